#include "runtime/virtual_clock.h"

#include <cmath>

namespace sim {
namespace {

// An amount of work at a rate per second.
int64_t DurationNs(double amount, double per_s) { return std::llround(amount / per_s * 1e9); }

}  // namespace

int64_t VirtualClock::Launch(const Config& config, int host, StreamId stream, TaskKind kind,
                             int64_t nbytes, double flops) {
  if (kind == TaskKind::kInternal) return 0;
  host_ns_[host] += config.launch_ns;
  int64_t start_ns = DoneNs(host, stream);
  int64_t duration_ns = 0;
  const auto amount = static_cast<double>(nbytes);
  if (kind == TaskKind::kKernel) {
    duration_ns = std::max({config.min_kernel_ns, DurationNs(amount, config.hbm_bytes_per_s),
                            DurationNs(flops, config.flops_per_s)});
  } else {
    const bool is_d2h = kind == TaskKind::kD2H;
    const double rate = is_d2h ? config.d2h_bytes_per_s : config.h2d_bytes_per_s;
    start_ns = std::max(start_ns, link_ns_[is_d2h]);
    duration_ns = config.copy_latency_ns + DurationNs(amount, rate);
    link_ns_[is_d2h] = start_ns + duration_ns;
  }
  stream_ns_[stream] = start_ns + duration_ns;
  return duration_ns;
}

int64_t VirtualClock::AllDoneNs() const {
  return std::max(*std::max_element(host_ns_.begin(), host_ns_.end()),
                  *std::max_element(stream_ns_.begin(), stream_ns_.end()));
}

void VirtualClock::Restart() {
  origin_ns_ = AllDoneNs();
  host_ns_.fill(origin_ns_);
  stream_ns_.fill(origin_ns_);
  link_ns_.fill(origin_ns_);
}

}  // namespace sim

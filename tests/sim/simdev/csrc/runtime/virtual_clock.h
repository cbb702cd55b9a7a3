// When things would happen on a device with the configured speeds.
//
// Time is computed while tasks are queued, in program order, so it is the same under every
// scheduler and on every machine. A stream runs its tasks one after the other; each direction of
// the link carries one copy at a time; kernels of different streams do not slow each other down.
//
// Nothing here is locked: the caller serialises. All times are in nanoseconds.
#ifndef SIMDEV_RUNTIME_VIRTUAL_CLOCK_H_
#define SIMDEV_RUNTIME_VIRTUAL_CLOCK_H_

#include "runtime/config.h"
#include "runtime/types.h"

namespace sim {

class VirtualClock {
 public:
  // Puts a task at the end of `stream`, queued by the host clock `host`: the host is busy for the
  // launch, then the stream for the task. Returns how long the task itself takes.
  int64_t Launch(const Config& config, int host, StreamId stream, TaskKind kind, int64_t nbytes,
                 double flops);

  // When all that is queued on `stream` by `host` so far will be done.
  int64_t DoneNs(int host, StreamId stream) const {
    return std::max(stream_ns_[stream], host_ns_[host]);
  }
  int64_t HostNs(int host) const { return host_ns_[host]; }
  int64_t StreamNs(StreamId stream) const { return stream_ns_[stream]; }

  // Nothing that the stream or the host does from now on happens before `time_ns`.
  void DelayStream(StreamId stream, int64_t time_ns) {
    stream_ns_[stream] = std::max(stream_ns_[stream], time_ns);
  }
  void DelayHost(int host, int64_t time_ns) { host_ns_[host] = std::max(host_ns_[host], time_ns); }

  // The host does something else for a while.
  void AdvanceHost(int host, int64_t duration_ns) { host_ns_[host] += duration_ns; }

  // When everything is done, streams and hosts. Times are relative to the last Restart.
  int64_t AllDoneNs() const;
  int64_t OriginNs() const { return origin_ns_; }

  // Counts time from AllDoneNs() on. The past stays in order: times of marks remain comparable.
  void Restart();

 private:
  int64_t origin_ns_ = 0;
  std::array<int64_t, kHostClocks> host_ns_{};
  std::array<int64_t, kStreams> stream_ns_{};
  std::array<int64_t, 2> link_ns_{};  // when a direction is free: H2D, D2H
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_VIRTUAL_CLOCK_H_

// What a test can choose about the device.
#ifndef SIMDEV_RUNTIME_CONFIG_H_
#define SIMDEV_RUNTIME_CONFIG_H_

#include <cstdint>

namespace sim {

enum class Scheduler {
  kEager,    // a task runs when it is queued, on the thread that queues it
  kThreads,  // one thread per stream
  kLazy,     // a task runs only when a host synchronisation needs it
  kRandom,   // like kLazy, and random streams make progress whenever something is queued
};

constexpr int64_t kQueryNs = 500;

struct Config {
  Scheduler scheduler = Scheduler::kEager;
  uint64_t seed = 0;  // of kRandom; applies when the configuration is set

  bool async_operators = true;  // false: the host waits for every operator
  bool detect_races = true;
  bool poison = true;       // fill device memory with 0xFF when it is allocated and when freed
  bool guard_host = false;  // protect pages of pinned memory while a copy uses them

  // The model behind virtual time.
  double d2h_bytes_per_s = 25e9;
  double h2d_bytes_per_s = 25e9;
  double hbm_bytes_per_s = 2e12;
  double flops_per_s = 200e12;
  int64_t launch_ns = 4000;        // on the host, per kernel or copy
  int64_t copy_latency_ns = 8000;  // per copy over the link
  int64_t min_kernel_ns = 3000;
  // Whether something is done is told by the virtual clock, as a device of that speed would tell
  // it, and not by which tasks have run. A query that says no costs the host kQueryNs.
  bool timed_queries = false;
  // kThreads: a task sleeps for this multiple of its virtual duration before it does its work.
  double sleep_scale = 0;

  int64_t capacity_bytes = int64_t{8} << 30;
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_CONFIG_H_

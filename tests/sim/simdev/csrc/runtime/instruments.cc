// The part of Device that watches: host accesses, host clocks, virtual time, counters and faults.
#include <stdexcept>

#include "runtime/device.h"

namespace sim {

void Device::HostAccess(const void* pointer, size_t nbytes, bool is_write,
                        const std::string& what) {
  const Lock lock(mutex_);
  if (!config_.detect_races) return;
  const uintptr_t address = AddressOf(pointer);
  detector_.Step(HostActor(host_clock_), what, {{address, address + nbytes, is_write}});
}

void Device::Forget(const void* pointer, size_t nbytes) {
  const Lock lock(mutex_);
  detector_.Forget(AddressOf(pointer), AddressOf(pointer) + nbytes);
}

std::vector<std::string> Device::Races(bool clear) {
  const Lock lock(mutex_);
  std::vector<std::string> reports = detector_.Reports();
  if (clear) detector_.ClearReports();
  return reports;
}

void Device::OwnHostClock() {
  const Lock lock(mutex_);
  if (host_clock_ != 0) return;
  // With more threads than clocks some share one, and races between those are missed.
  host_clock_ = 1 + (next_host_clock_++ - 1) % (kHostClocks - 1);
  LearnOnHost(detector_.Knowledge(HostActor(0)), clock_.HostNs(0));
}

void Device::SharedHostClock() { host_clock_ = 0; }

void Device::HostRelease(uint64_t token) {
  const Lock lock(mutex_);
  HandOver& hand_over = hand_overs_[token];
  hand_over.clock.Join(detector_.Knowledge(HostActor(host_clock_)));
  hand_over.time_ns = std::max(hand_over.time_ns, clock_.HostNs(host_clock_));
}

void Device::HostAcquire(uint64_t token) {
  const Lock lock(mutex_);
  const auto hand_over = hand_overs_.find(token);
  if (hand_over == hand_overs_.end()) return;
  LearnOnHost(hand_over->second.clock, hand_over->second.time_ns);
}

int64_t Device::AllDoneNs() const {
  const Lock lock(mutex_);
  return clock_.AllDoneNs() - clock_.OriginNs();
}

int64_t Device::HostNs() const {
  const Lock lock(mutex_);
  return clock_.HostNs(host_clock_) - clock_.OriginNs();
}

void Device::AdvanceHost(int64_t duration_ns) {
  const Lock lock(mutex_);
  clock_.AdvanceHost(host_clock_, duration_ns);
}

Counters Device::counters() const {
  const Lock lock(mutex_);
  Counters counters = counters_;
  counters.tasks_run = static_cast<int64_t>(executor_.tasks_run() - tasks_run_before_);
  return counters;
}

void Device::InjectFault(TaskKind kind, int nth) {
  const Lock lock(mutex_);
  fault_kind_ = kind;
  fault_countdown_ = nth;
}

}  // namespace sim

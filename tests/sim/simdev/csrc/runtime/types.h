// The words that all parts of the simulated device share.
#ifndef SIMDEV_RUNTIME_TYPES_H_
#define SIMDEV_RUNTIME_TYPES_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace sim {

// Stream 0 is the default stream; the others are handed out in turn, as by a pool.
using StreamId = int;
inline constexpr int kStreams = 17;

// Actors are what runs concurrently: the streams, then the host clocks. All host threads share host
// clock 0 unless they ask for one of their own (Device::OwnHostClock).
using Actor = int;
inline constexpr int kHostClocks = 32;
inline constexpr int kActors = kStreams + kHostClocks;
constexpr Actor HostActor(int host_clock) { return kStreams + host_clock; }

enum class TaskKind {
  kKernel,    // an operator, or a copy within the device
  kH2D,       // a copy over the link to the device
  kD2H,       // a copy over the link from the device
  kInternal,  // poisoning, events: costs no virtual time
};

// A range of addresses that a task reads or writes; empty when begin >= end.
struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool is_write = false;
};

inline uintptr_t AddressOf(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
inline void* PointerTo(uintptr_t address) { return reinterpret_cast<void*>(address); }

// What an actor knows: entry `a` is the last step of actor `a` that happened before now.
class VectorClock {
 public:
  uint32_t operator[](Actor actor) const { return steps_[actor]; }
  void Tick(Actor actor) { ++steps_[actor]; }
  void Join(const VectorClock& other) {
    for (int a = 0; a < kActors; ++a) steps_[a] = std::max(steps_[a], other.steps_[a]);
  }

 private:
  std::array<uint32_t, kActors> steps_{};
};

// One recorded version of an event. Immutable but for `done`: who waits for it is unaffected by a
// later record of the same event.
struct Mark {
  StreamId stream = 0;
  uint64_t position = 0;  // of the task that completes it, counted from 1 in its stream
  VectorClock clock;      // what has happened once it is done
  int64_t time_ns = 0;    // virtual time at which it is done
  std::atomic<bool> done{false};
};
using MarkPtr = std::shared_ptr<Mark>;

struct MemoryStats {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t allocated_bytes = 0;  // summed over all allocations
  int64_t freed_bytes = 0;
  int64_t allocations = 0;

  void Add(int64_t nbytes) {
    current_bytes += nbytes;
    allocated_bytes += nbytes;
    ++allocations;
    peak_bytes = std::max(peak_bytes, current_bytes);
  }
  void Remove(int64_t nbytes) {
    current_bytes -= nbytes;
    freed_bytes += nbytes;
  }
  void ResetPeak() { peak_bytes = current_bytes; }
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_TYPES_H_

// The simulated device: one of them, with its memory, streams, events and instruments.
//
// All functions may be called from any thread. Those that wait, and under kEager and kRandom those
// that queue, run tasks on the calling thread. None of them may be called by a task.
//
// [Note: host clocks]
// What the host knows (and when, in virtual time) is kept by a host clock. Normally all threads
// share one: what one thread waited for, all know. That never reports a race that is none, and is
// right for threads that take turns, such as a main thread and autograd's thread for the device. It
// misses a hand-over that was forgotten between threads that work at the same time. Such a thread
// can have a clock of its own: then only HostRelease and HostAcquire carry knowledge to and fro.
#ifndef SIMDEV_RUNTIME_DEVICE_H_
#define SIMDEV_RUNTIME_DEVICE_H_

#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/arena.h"
#include "runtime/config.h"
#include "runtime/device_allocator.h"
#include "runtime/executor.h"
#include "runtime/pinned_memory.h"
#include "runtime/race_detector.h"
#include "runtime/types.h"
#include "runtime/virtual_clock.h"

namespace sim {

// Why the host waited.
enum class SyncReason { kStream, kEvent, kDevice, kCopy, kItem, kOperator };
inline constexpr int kSyncReasons = 6;

struct Counters {
  std::array<int64_t, kSyncReasons> syncs{};  // by SyncReason: calls, even if nothing was pending
  int64_t d2h_copies = 0;
  int64_t d2h_bytes = 0;
  int64_t h2d_copies = 0;
  int64_t h2d_bytes = 0;
  int64_t kernels = 0;
  int64_t tasks_run = 0;  // of all kinds
};

// What to queue. `body` runs when the scheduler decides; whatever it captures must stay valid until
// then. Memory of the device needs no care: freeing it is ordered by streams.
struct Work {
  std::string name;
  TaskKind kind = TaskKind::kKernel;
  std::function<void()> body;
  std::vector<Access> accesses;
  int64_t nbytes = 0;  // moved: over the link, or to and from device memory
  double flops = 0;
};

class Device {
 public:
  // Made by the first call; never destroyed, as tensors may outlive anything. Throws
  // std::system_error when the address space cannot be had.
  static Device& Get();

  Config config() const;

  // Runs all that is queued, then changes the configuration. What happened before the change
  // is ordered before all that comes after it. Nothing may be queued meanwhile; the same holds for
  // Reset and Shutdown.
  void Configure(const Config& config);

  // Configures the defaults, and forgets counters, races, errors, faults and cached memory. Peaks
  // start from what is allocated now and virtual time from 0. Registrations stay.
  void Reset();

  // Runs all that is queued and ends the threads; what is queued later may never run. For exit.
  void Shutdown();

  // --- Device memory.

  // Returns null when it does not fit in the capacity, even after waiting for freed blocks.
  void* Allocate(size_t nbytes, StreamId stream);
  void Free(void* pointer);  // null is allowed
  void RecordStream(const void* pointer, StreamId stream);
  void EmptyCache();
  bool Contains(const void* pointer) const { return device_arena_.Contains(AddressOf(pointer)); }
  // Where tasks find device memory. Null stays null.
  void* Back(const void* pointer) const;
  MemoryStats allocated() const;
  MemoryStats reserved() const;
  int64_t out_of_memory_count() const;
  void ResetPeaks();

  // --- Pinned host memory. See PinnedMemory for the results.

  void* AllocatePinned(size_t nbytes);
  void FreePinned(void* pointer);
  bool Register(void* pointer, size_t nbytes);
  // Counts as a write by the host: a copy that may still be in flight is a race.
  bool Unregister(void* pointer);
  bool IsPinned(const void* pointer) const;
  void* PinnedBack(const void* pointer) const;
  MemoryStats pinned() const;

  // --- Streams and events.

  static StreamId CurrentStream();  // of this thread
  static void SetCurrentStream(StreamId stream);
  static StreamId NextPoolStream();

  void Enqueue(StreamId stream, Work work);
  MarkPtr Record(StreamId stream);
  void WaitEvent(StreamId stream, const MarkPtr& mark);

  // Whether all is done. If so the host knows what happened before; if not, and no thread runs
  // tasks, one task runs so that polling comes to an end (or time goes on, with timed_queries).
  bool QueryStream(StreamId stream);
  bool QueryEvent(const MarkPtr& mark);

  // Wait, then throw std::runtime_error if a task has failed since the last such call.
  void SynchronizeStream(StreamId stream, SyncReason reason);
  void SynchronizeEvent(const MarkPtr& mark);
  void SynchronizeDevice();

  // --- Instruments.

  void HostAccess(const void* pointer, size_t nbytes, bool is_write, const std::string& what);
  // A range was reused by an allocator that orders its users by itself.
  void Forget(const void* pointer, size_t nbytes);
  std::vector<std::string> Races(bool clear);

  // See [Note: host clocks]. OwnHostClock starts with what the shared clock knows.
  void OwnHostClock();
  void SharedHostClock();
  // Leaves what this thread knows under `token`, and picks up all that was left there.
  void HostRelease(uint64_t token);
  void HostAcquire(uint64_t token);

  int64_t AllDoneNs() const;
  int64_t HostNs() const;  // of this thread's host clock
  void AdvanceHost(int64_t duration_ns);

  Counters counters() const;

  // The `nth` copy of `kind` that is queued from now on (1 is the next) fails instead of moving
  // bytes; the next synchronisation after it ran throws.
  void InjectFault(TaskKind kind, int nth);

 private:
  Device();

  void EnqueueLocked(Lock& lock, StreamId stream, Work work);
  MarkPtr RecordLocked(Lock& lock, StreamId stream);
  void Poison(Lock& lock, StreamId stream, uintptr_t address, size_t nbytes, const char* name);
  void ConfigureLocked(Lock& lock, const Config& config);
  void CountCopy(const Work& work);
  bool TakeFault(TaskKind kind);
  // Whether the host has come to `time_ns`; if not, asking has taken it a little closer.
  bool IsPast(int64_t time_ns);
  void LearnOnHost(const VectorClock& clock, int64_t time_ns);
  void SynchronizeLocked(Lock& lock, StreamId stream);
  void ThrowError();

  // What one host thread left for another.
  struct HandOver {
    VectorClock clock;
    int64_t time_ns = 0;
  };

  static inline thread_local int host_clock_ = 0;  // of this thread

  mutable std::mutex mutex_;  // guards all below; not held while a task's body runs
  Config config_;
  Arena device_arena_;
  Arena pinned_arena_;
  RaceDetector detector_;
  VirtualClock clock_;
  Executor executor_;
  DeviceAllocator allocator_;
  PinnedMemory pinned_;
  Counters counters_;              // but for tasks_run
  uint64_t tasks_run_before_ = 0;  // the last Reset
  int64_t out_of_memory_count_ = 0;
  std::unordered_map<uint64_t, HandOver> hand_overs_;
  int next_host_clock_ = 1;
  TaskKind fault_kind_ = TaskKind::kInternal;
  int fault_countdown_ = 0;  // 0: no fault is due
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_DEVICE_H_

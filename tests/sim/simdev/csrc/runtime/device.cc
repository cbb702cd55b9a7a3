#include "runtime/device.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace sim {
namespace {

// Addresses cost nothing until they are used.
constexpr size_t kDeviceArenaBytes = size_t{64} << 30;
constexpr size_t kPinnedArenaBytes = size_t{32} << 30;
constexpr int kPoison = 0xFF;  // NaN in every floating-point type

thread_local StreamId current_stream = 0;

}  // namespace

Device& Device::Get() {
  static Device* const device = new Device;
  return *device;
}

Device::Device()
    : device_arena_(Arena::Device(kDeviceArenaBytes)),
      pinned_arena_(Arena::Pinned(kPinnedArenaBytes)),
      executor_(&mutex_),
      allocator_(&device_arena_, &detector_),
      pinned_(&pinned_arena_) {}

Config Device::config() const {
  const Lock lock(mutex_);
  return config_;
}

void Device::Configure(const Config& config) {
  Lock lock(mutex_);
  ConfigureLocked(lock, config);
}

void Device::ConfigureLocked(Lock& lock, const Config& config) {
  executor_.Restart(lock, config.scheduler, config.seed);
  detector_.OrderAll();
  config_ = config;
}

void Device::Reset() {
  Lock lock(mutex_);
  ConfigureLocked(lock, Config());
  executor_.TakeError();
  fault_countdown_ = 0;
  detector_.ClearReports();
  hand_overs_.clear();
  allocator_.CollectDeferred();
  allocator_.ReleaseCached();
  allocator_.ResetPeaks();
  pinned_.ResetPeak();
  out_of_memory_count_ = 0;
  clock_.Restart();
  counters_ = Counters();
  tasks_run_before_ = executor_.tasks_run();
}

void Device::Shutdown() {
  Lock lock(mutex_);
  Config config = config_;
  config.scheduler = Scheduler::kLazy;
  ConfigureLocked(lock, config);
}

// --- Device memory.

void* Device::Allocate(size_t nbytes, StreamId stream) {
  Lock lock(mutex_);
  const auto allocate = [&] {
    allocator_.CollectDeferred();
    return allocator_.Allocate(nbytes, stream, config_.capacity_bytes);
  };
  uintptr_t address = allocate();
  if (address == 0) {
    // As on a GPU: giving memory back waits for the device, and so for deferred blocks.
    executor_.Drain(lock);
    allocator_.CollectDeferred();
    allocator_.ReleaseCached();
    address = allocate();
  }
  if (address == 0) {
    ++out_of_memory_count_;
    return nullptr;
  }
  Poison(lock, stream, address, allocator_.NbytesOf(address), "allocation");
  return PointerTo(address);
}

void Device::Free(void* pointer) {
  if (pointer == nullptr) return;
  Lock lock(mutex_);
  DeviceAllocator::Block block = allocator_.Free(AddressOf(pointer));
  if (block.other_streams.empty()) {
    Poison(lock, block.stream, block.address, block.nbytes, "free");
    allocator_.Reuse(block);
    return;
  }
  std::vector<MarkPtr> marks;
  marks.reserve(block.other_streams.size());
  for (const StreamId stream : block.other_streams) marks.push_back(RecordLocked(lock, stream));
  allocator_.Defer(std::move(block), std::move(marks));
}

void Device::RecordStream(const void* pointer, StreamId stream) {
  const Lock lock(mutex_);
  allocator_.RecordStream(AddressOf(pointer), stream);
}

void Device::EmptyCache() {
  Lock lock(mutex_);
  executor_.Drain(lock);
  allocator_.CollectDeferred();
  allocator_.ReleaseCached();
}

void* Device::Back(const void* pointer) const {
  return pointer == nullptr ? nullptr : PointerTo(device_arena_.Back(AddressOf(pointer)));
}

MemoryStats Device::allocated() const {
  const Lock lock(mutex_);
  return allocator_.allocated();
}

MemoryStats Device::reserved() const {
  const Lock lock(mutex_);
  return allocator_.reserved();
}

int64_t Device::out_of_memory_count() const {
  const Lock lock(mutex_);
  return out_of_memory_count_;
}

void Device::ResetPeaks() {
  const Lock lock(mutex_);
  allocator_.ResetPeaks();
}

void Device::Poison(Lock& lock, StreamId stream, uintptr_t address, size_t nbytes,
                    const char* name) {
  if (!config_.poison) return;
  Work work;
  work.name = name;
  work.kind = TaskKind::kInternal;
  work.body = [back = PointerTo(device_arena_.Back(address)), nbytes] {
    std::memset(back, kPoison, nbytes);
  };
  work.accesses = {{address, address + nbytes, true}};
  EnqueueLocked(lock, stream, std::move(work));
}

// --- Pinned host memory.

void* Device::AllocatePinned(size_t nbytes) {
  const Lock lock(mutex_);
  return PointerTo(pinned_.Allocate(nbytes));
}

void Device::FreePinned(void* pointer) {
  const Lock lock(mutex_);
  const uintptr_t address = AddressOf(pointer);
  detector_.Forget(address, address + pinned_.Free(address));
}

bool Device::Register(void* pointer, size_t nbytes) {
  const Lock lock(mutex_);
  return pinned_.Register(AddressOf(pointer), nbytes);
}

bool Device::Unregister(void* pointer) {
  const Lock lock(mutex_);
  const uintptr_t address = AddressOf(pointer);
  const uintptr_t end = address + pinned_.RegisteredBytes(address);
  if (end == address) return false;
  if (config_.detect_races) {
    detector_.Step(HostActor(host_clock_), "host_unregister", {{address, end, true}});
  }
  detector_.Forget(address, end);
  pinned_.Unregister(address);
  return true;
}

bool Device::IsPinned(const void* pointer) const {
  const Lock lock(mutex_);
  return pinned_.Contains(AddressOf(pointer));
}

void* Device::PinnedBack(const void* pointer) const {
  return PointerTo(pinned_.Back(AddressOf(pointer)));
}

MemoryStats Device::pinned() const {
  const Lock lock(mutex_);
  return pinned_.stats();
}

// --- Streams and events.

StreamId Device::CurrentStream() { return current_stream; }

void Device::SetCurrentStream(StreamId stream) { current_stream = stream; }

StreamId Device::NextPoolStream() {
  static std::atomic<unsigned> handed_out{0};
  return static_cast<StreamId>(1 + handed_out++ % (kStreams - 1));
}

void Device::Enqueue(StreamId stream, Work work) {
  Lock lock(mutex_);
  EnqueueLocked(lock, stream, std::move(work));
}

void Device::EnqueueLocked(Lock& lock, StreamId stream, Work work) {
  detector_.Learn(stream, detector_.Knowledge(HostActor(host_clock_)));
  if (config_.detect_races) detector_.Step(stream, work.name, work.accesses);
  const int64_t duration_ns =
      clock_.Launch(config_, host_clock_, stream, work.kind, work.nbytes, work.flops);
  CountCopy(work);
  Task task;
  task.name = std::move(work.name);
  task.kind = work.kind;
  task.body = std::move(work.body);
  task.sleep_ns = static_cast<int64_t>(static_cast<double>(duration_ns) * config_.sleep_scale);
  task.fails = TakeFault(work.kind);
  if (config_.guard_host && (work.kind == TaskKind::kD2H || work.kind == TaskKind::kH2D)) {
    for (const Access& access : work.accesses) pinned_.Protect(access);
    task.on_done = [this, accesses = std::move(work.accesses)] {
      for (const Access& access : accesses) pinned_.Unprotect(access);
    };
  }
  executor_.Push(lock, stream, std::move(task));
}

MarkPtr Device::Record(StreamId stream) {
  Lock lock(mutex_);
  return RecordLocked(lock, stream);
}

MarkPtr Device::RecordLocked(Lock& lock, StreamId stream) {
  detector_.Learn(stream, detector_.Knowledge(HostActor(host_clock_)));
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  mark->position = executor_.Queued(stream) + 1;
  mark->clock = detector_.Knowledge(stream);
  mark->time_ns = clock_.DoneNs(host_clock_, stream);
  Task task;
  task.name = "event record";
  task.signal = mark;
  executor_.Push(lock, stream, std::move(task));
  return mark;
}

void Device::WaitEvent(StreamId stream, const MarkPtr& mark) {
  Lock lock(mutex_);
  detector_.Learn(stream, mark->clock);
  clock_.DelayStream(stream, mark->time_ns);
  Task task;
  task.name = "event wait";
  task.wait = mark;
  executor_.Push(lock, stream, std::move(task));
}

bool Device::QueryStream(StreamId stream) {
  Lock lock(mutex_);
  if (config_.timed_queries) {
    if (!IsPast(clock_.StreamNs(stream))) return false;
    executor_.WaitFor(lock, stream, executor_.Queued(stream));
  }
  if (executor_.Done(stream) < executor_.Queued(stream)) {
    executor_.Nudge(lock, stream);
    return false;
  }
  LearnOnHost(detector_.Knowledge(stream), clock_.StreamNs(stream));
  return true;
}

bool Device::QueryEvent(const MarkPtr& mark) {
  Lock lock(mutex_);
  if (config_.timed_queries) {
    if (!IsPast(mark->time_ns)) return false;
    executor_.WaitFor(lock, mark->stream, mark->position);
  }
  if (!mark->done) {
    executor_.Nudge(lock, mark->stream);
    return false;
  }
  LearnOnHost(mark->clock, mark->time_ns);
  return true;
}

void Device::SynchronizeStream(StreamId stream, SyncReason reason) {
  Lock lock(mutex_);
  ++counters_.syncs[static_cast<size_t>(reason)];
  SynchronizeLocked(lock, stream);
  ThrowError();
}

void Device::SynchronizeEvent(const MarkPtr& mark) {
  Lock lock(mutex_);
  ++counters_.syncs[static_cast<size_t>(SyncReason::kEvent)];
  executor_.WaitFor(lock, mark->stream, mark->position);
  LearnOnHost(mark->clock, mark->time_ns);
  ThrowError();
}

void Device::SynchronizeDevice() {
  Lock lock(mutex_);
  ++counters_.syncs[static_cast<size_t>(SyncReason::kDevice)];
  for (StreamId stream = 0; stream < kStreams; ++stream) SynchronizeLocked(lock, stream);
  ThrowError();
}

void Device::SynchronizeLocked(Lock& lock, StreamId stream) {
  // Others may queue more on the stream meanwhile, which is not waited for.
  const VectorClock clock = detector_.Knowledge(stream);
  const int64_t time_ns = clock_.StreamNs(stream);
  executor_.WaitFor(lock, stream, executor_.Queued(stream));
  LearnOnHost(clock, time_ns);
}

void Device::ThrowError() {
  const std::string error = executor_.TakeError();
  if (!error.empty()) throw std::runtime_error("simdev: a task failed: " + error);
}

bool Device::IsPast(int64_t time_ns) {
  if (time_ns <= clock_.HostNs(host_clock_)) return true;
  clock_.AdvanceHost(host_clock_, kQueryNs);
  return false;
}

void Device::LearnOnHost(const VectorClock& clock, int64_t time_ns) {
  detector_.Learn(HostActor(host_clock_), clock);
  clock_.DelayHost(host_clock_, time_ns);
}

void Device::CountCopy(const Work& work) {
  if (work.kind == TaskKind::kD2H) {
    ++counters_.d2h_copies;
    counters_.d2h_bytes += work.nbytes;
  } else if (work.kind == TaskKind::kH2D) {
    ++counters_.h2d_copies;
    counters_.h2d_bytes += work.nbytes;
  } else if (work.kind == TaskKind::kKernel) {
    ++counters_.kernels;
  }
}

bool Device::TakeFault(TaskKind kind) {
  if (fault_countdown_ == 0 || kind != fault_kind_) return false;
  --fault_countdown_;
  return fault_countdown_ == 0;
}

}  // namespace sim

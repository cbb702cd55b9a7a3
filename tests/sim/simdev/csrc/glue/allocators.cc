#include "glue/allocators.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

#include "glue/tensors.h"

namespace sim {
namespace {

void FreeDeviceMemory(void* pointer) { Device::Get().Free(pointer); }

class DeviceMemoryAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = nullptr;
    if (nbytes > 0) {
      pointer = Device::Get().Allocate(nbytes, Device::CurrentStream());
      TORCH_CHECK_WITH(OutOfMemoryError, pointer != nullptr,
                       "sim out of memory. Tried to allocate ", nbytes, " bytes; ",
                       Device::Get().allocated().current_bytes, " of ",
                       Device::Get().config().capacity_bytes, " bytes are allocated.");
    }
    return {pointer, pointer, &FreeDeviceMemory, TorchDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &FreeDeviceMemory; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    CopyOnDevice(to, from, nbytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { Device::Get().EmptyCache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Device::Get().RecordStream(data.get(), IdOf(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const MemoryStats allocated = Device::Get().allocated();
    const MemoryStats reserved = Device::Get().reserved();
    for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      Set(array, allocated);
    }
    Set(&stats.reserved_bytes, reserved);
    stats.num_device_alloc = reserved.allocations;
    stats.num_ooms = Device::Get().out_of_memory_count();
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}  // the device keeps them
  void resetPeakStats(c10::DeviceIndex) override { Device::Get().ResetPeaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const int64_t capacity_bytes = Device::Get().config().capacity_bytes;
    return {capacity_bytes - Device::Get().reserved().current_bytes, capacity_bytes};
  }

 private:
  static void Set(c10::CachingAllocator::StatArray* array, const MemoryStats& stats) {
    auto& aggregate = (*array)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    aggregate.current = stats.current_bytes;
    aggregate.peak = stats.peak_bytes;
    aggregate.allocated = stats.allocated_bytes;
    aggregate.freed = stats.freed_bytes;
  }
};

DeviceMemoryAllocator device_memory_allocator;
REGISTER_ALLOCATOR(kDeviceType, &device_memory_allocator)

class PinnedAllocatorImpl final : public at::CachingHostAllocatorImpl<c10::Stream, MarkPtr> {
 public:
  std::pair<void*, void*> allocate(size_t nbytes) override {
    const auto result = CachingHostAllocatorImpl::allocate(nbytes);
    if (result.first != nullptr) Device::Get().Forget(result.first, nbytes);
    return result;
  }

 private:
  void allocate_host_memory(size_t nbytes, void** pointer) override {
    *pointer = Device::Get().AllocatePinned(nbytes);
    TORCH_CHECK(*pointer != nullptr, "simdev: no pinned memory of ", nbytes, " bytes is left");
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    Device::Get().FreePinned(block->ptr_);
  }
  void record_stream(std::optional<std::vector<MarkPtr>>& marks, c10::Stream stream) override {
    marks.value().push_back(Device::Get().Record(IdOf(stream)));
  }
  // Not Device::QueryEvent: that this allocator polls teaches the host nothing.
  bool query_event(MarkPtr& mark) override { return mark->done; }
  bool stream_is_capturing(c10::Stream) const override { return false; }
  c10::Stream get_current_stream() const override { return TorchStream(Device::CurrentStream()); }
};

DECLARE_HOST_ALLOCATOR(PinnedAllocator, PinnedAllocatorImpl, FreePinnedMemory, pinned_allocator)
REGISTER_HOST_ALLOCATOR(kDeviceType, &pinned_allocator)

}  // namespace

c10::Allocator& DeviceMemory() { return device_memory_allocator; }

at::HostAllocator& PinnedMemoryAllocator() { return pinned_allocator; }

void CopyOnDevice(void* to, const void* from, size_t nbytes) {
  Work work;
  work.name = "storage copy";
  work.body = [to = Device::Get().Back(to), from = Device::Get().Back(from), nbytes] {
    std::memcpy(to, from, nbytes);
  };
  const uintptr_t source = AddressOf(from);
  const uintptr_t target = AddressOf(to);
  work.accesses = {{source, source + nbytes, false}, {target, target + nbytes, true}};
  work.nbytes = static_cast<int64_t>(2 * nbytes);
  Device::Get().Enqueue(Device::CurrentStream(), std::move(work));
}

}  // namespace sim

// What torch asks a backend for: streams and events (the guard), pinned memory and generators.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "glue/allocators.h"
#include "glue/generator.h"
#include "glue/tensors.h"

namespace sim {
namespace {

// What a void* of torch's events points to. Made by the first record.
struct Event {
  MarkPtr mark;
};
Event* EventAt(void* event) { return static_cast<Event*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device) const override { return TorchDevice(); }
  c10::Device getDevice() const override { return TorchDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const override { return TorchStream(Device::CurrentStream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return TorchStream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return TorchStream(Device::NextPoolStream());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return TorchStream(Device::NextPoolStream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = TorchStream(Device::CurrentStream());
    Device::SetCurrentStream(IdOf(stream));
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return PointerTo(static_cast<uintptr_t>(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Device::Get().QueryStream(IdOf(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Device::Get().SynchronizeStream(IdOf(stream), SyncReason::kStream);
  }
  void synchronizeDevice(c10::DeviceIndex) const override { Device::Get().SynchronizeDevice(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    EventAt(*event)->mark = Device::Get().Record(IdOf(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Device::Get().WaitEvent(IdOf(stream), EventAt(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Device::Get().QueryEvent(EventAt(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Device::Get().SynchronizeEvent(EventAt(event)->mark);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete EventAt(event);
  }
  // In virtual time.
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "simdev: an event was not recorded");
    const MarkPtr& begin = EventAt(first)->mark;
    const MarkPtr& end = EventAt(second)->mark;
    TORCH_CHECK(begin->done && end->done, "simdev: an event is not done");
    return static_cast<double>(end->time_ns - begin->time_ns) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Device::Get().RecordStream(data.get(), IdOf(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }

  bool isPinnedPtr(const void* pointer) const override { return Device::Get().IsPinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemoryAllocator(); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    TORCH_CHECK(Device::Get().Contains(pointer), "simdev: not an address of the device");
    return TorchDevice();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return DefaultGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return NewGenerator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr data = DeviceMemory().allocate(nbytes);
    const size_t kept_bytes = std::min(impl->nbytes(), nbytes);
    if (kept_bytes > 0) CopyOnDevice(data.get(), impl->data(), kept_bytes);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

// torch keeps the pointer for good.
const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace sim

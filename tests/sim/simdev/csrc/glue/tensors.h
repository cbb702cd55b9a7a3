// Between torch's tensors and the device's addresses.
#ifndef SIMDEV_GLUE_TENSORS_H_
#define SIMDEV_GLUE_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "runtime/device.h"

namespace sim {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

inline c10::Device TorchDevice() { return {kDeviceType, 0}; }
inline c10::Stream TorchStream(StreamId stream) {
  return c10::Stream(c10::Stream::UNSAFE, TorchDevice(), stream);
}
inline StreamId IdOf(const c10::Stream& stream) { return static_cast<StreamId>(stream.id()); }

// The allocator of device memory. Lives as long as the process.
c10::Allocator& DeviceMemory();

// A new tensor on the device.
at::Tensor EmptyOnDevice(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// A CPU tensor over the memory of `tensor`, as tasks see it. It does not own the memory. CPU
// tensors and undefined ones come back as they are.
at::Tensor TaskView(const at::Tensor& tensor);

// The same for a CPU tensor: not affected by the protection of pinned memory in flight.
at::Tensor HostTaskView(const at::Tensor& tensor);

// The bytes between the first and the last element, whatever the strides skip in between.
Access AccessTo(const at::Tensor& tensor, bool is_write);

int64_t BytesOf(const at::Tensor& tensor);

}  // namespace sim

#endif  // SIMDEV_GLUE_TENSORS_H_

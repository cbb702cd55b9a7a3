#include "glue/tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

namespace sim {
namespace {

const void* FirstByte(const at::Tensor& tensor) {
  const auto offset_bytes = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
  return static_cast<const std::byte*>(tensor.storage().data()) + offset_bytes;
}

at::Tensor ViewAt(void* address, const at::Tensor& like) {
  const auto options = like.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  at::Tensor view = at::from_blob(address, like.sizes(), like.strides(), options);
  if (like.is_conj()) view._set_conj(true);
  if (like.is_neg()) view._set_neg(true);
  return view;
}

}  // namespace

at::Tensor EmptyOnDevice(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &DeviceMemory(), kKeys, dtype);
}

at::Tensor TaskView(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  if (tensor.storage().data() == nullptr) {  // no bytes, so nothing to look at
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  return ViewAt(Device::Get().Back(FirstByte(tensor)), tensor);
}

at::Tensor HostTaskView(const at::Tensor& tensor) {
  return ViewAt(Device::Get().PinnedBack(FirstByte(tensor)), tensor);
}

Access AccessTo(const at::Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const uintptr_t begin = AddressOf(FirstByte(tensor));
  return {begin, begin + static_cast<uintptr_t>(last + 1) * tensor.element_size(), is_write};
}

int64_t BytesOf(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

}  // namespace sim

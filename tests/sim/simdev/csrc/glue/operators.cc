// Operators that cannot or should not go through the fallback.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "glue/copies.h"
#include "glue/fallback.h"
#include "glue/tensors.h"

namespace sim {
namespace {

using at::IntArrayRef;
using at::Tensor;

void RefuseToPin(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only dense CPU tensors can be pinned");
}

Tensor Empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat> memory_format) {
  RefuseToPin(pin_memory);
  return at::detail::empty_generic(sizes, &DeviceMemory(), kKeys, c10::dtype_or_default(dtype),
                                   memory_format);
}

Tensor EmptyStrided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout>, std::optional<at::Device>,
                    std::optional<bool> pin_memory) {
  RefuseToPin(pin_memory);
  return EmptyOnDevice(sizes, strides, c10::dtype_or_default(dtype));
}

const Tensor& Resize(const Tensor& tensor, IntArrayRef sizes,
                     std::optional<at::MemoryFormat> memory_format) {
  return at::native::resize_(tensor, sizes, memory_format);
}

Tensor& SetStorage(Tensor& tensor, at::Storage storage) {
  return at::native::set_(tensor, std::move(storage));
}

Tensor& SetStorageOffset(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef sizes,
                         IntArrayRef strides) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, sizes, strides);
}

Tensor& SetTensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

void RecordStream(Tensor& tensor, c10::Stream stream) {
  Device::Get().RecordStream(tensor.storage().data(), IdOf(stream));
}

std::tuple<Tensor, Tensor> NativeDropout(const Tensor& input, double p, std::optional<bool> train) {
  const auto bools = input.options().dtype(at::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, bools)};
  const Tensor mask = at::empty_like(input, bools).bernoulli_(1 - p);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

int64_t FusedSdpChoice(const Tensor& query, const Tensor&, const Tensor&,
                       const std::optional<Tensor>&, double dropout_p, bool, std::optional<double>,
                       bool) {
  const bool can_be_flash =
      dropout_p == 0 && query.dim() == 4 && at::globalContext().userEnabledFlashSDP();
  return static_cast<int64_t>(can_be_flash ? sdp::SDPBackend::flash_attention
                                           : sdp::SDPBackend::math);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", Empty);
  m.impl("empty_strided", EmptyStrided);
  m.impl("resize_", Resize);
  m.impl("set_.source_Storage", SetStorage);
  m.impl("set_.source_Storage_storage_offset", SetStorageOffset);
  m.impl("set_.source_Tensor", SetTensor);

  // Views: no task at all.
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));

  m.impl("_copy_from", CopyFrom);
  m.impl("_copy_from_and_resize", CopyFromAndResize);
  m.impl("_local_scalar_dense", Item);
  m.impl("record_stream", RecordStream);

  // On an unknown backend torch would take these apart, and autograd would save other tensors than
  // it does on a GPU. Registered, they stay whole.
  m.impl("native_dropout", NativeDropout);
  m.impl("_fused_sdp_choice", FusedSdpChoice);
  for (const char* name : {"native_layer_norm", "native_group_norm", "native_batch_norm",
                           "convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  }
}

// Copies resolve these bits themselves. By default torch would resolve them before, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::FusedSdpChoice)
}  // namespace at::native

#include "glue/copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "glue/allocators.h"
#include "glue/tensors.h"

namespace sim {
namespace {

std::function<void()> CopyTask(at::Tensor from, at::Tensor to) {
  return [from = std::move(from), to = std::move(to)] {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const bool is_plain = from.is_contiguous() && to.is_contiguous() &&
                          from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
                          from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
    if (is_plain) {
      std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
    } else {
      to.copy_(from);
    }
  };
}

void CopyWithinDevice(const at::Tensor& from, const at::Tensor& to) {
  Work work;
  work.name = "copy D2D";
  work.body = CopyTask(TaskView(from), TaskView(to));
  work.accesses = {AccessTo(from, false), AccessTo(to, true)};
  work.nbytes = BytesOf(from) + BytesOf(to);
  Device::Get().Enqueue(Device::CurrentStream(), std::move(work));
}

// Returns whether the host memory is pinned.
bool CopyOverLink(const at::Tensor& from, const at::Tensor& to) {
  const bool is_d2h = from.is_privateuseone();
  const at::Tensor& host = is_d2h ? to : from;
  void* const host_data = const_cast<void*>(host.storage().data());
  const bool is_pinned = Device::Get().IsPinned(host_data);
  const StreamId stream = Device::CurrentStream();

  Work work;
  work.name = is_d2h ? "copy D2H" : "copy H2D";
  work.kind = is_d2h ? TaskKind::kD2H : TaskKind::kH2D;
  work.body = is_d2h ? CopyTask(TaskView(from), HostTaskView(to))
                     : CopyTask(HostTaskView(from), TaskView(to));
  work.accesses = {AccessTo(is_d2h ? from : to, !is_d2h)};
  // Pageable memory is not accessed by the device: the host stages it, and waits.
  if (is_pinned) work.accesses.push_back(AccessTo(host, is_d2h));
  work.nbytes = BytesOf(to);
  Device::Get().Enqueue(stream, std::move(work));
  if (is_pinned) {
    PinnedMemoryAllocator().record_event(host_data, host.storage().data_ptr().get_context(),
                                         TorchStream(stream));
  }
  return is_pinned;
}

}  // namespace

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (from.is_privateuseone() && to.is_privateuseone()) {
    CopyWithinDevice(from, to);
    return to;
  }
  const bool is_pinned = CopyOverLink(from, to);
  if (!is_pinned || !non_blocking) {
    Device::Get().SynchronizeStream(Device::CurrentStream(), SyncReason::kCopy);
  }
  return to;
}

at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return CopyFrom(from, to, false);
}

void StoreOnDevice(const at::Tensor& computed, const at::Tensor& result) {
  if (result.numel() == 0) return;
  Work work;
  work.name = "result";
  work.kind = TaskKind::kInternal;
  work.body = CopyTask(computed, TaskView(result));
  work.accesses = {AccessTo(result, true)};
  Device::Get().Enqueue(Device::CurrentStream(), std::move(work));
}

at::Scalar Item(const at::Tensor& tensor) {
  const at::Tensor value = at::empty({}, tensor.options().device(at::kCPU));
  CopyOverLink(tensor, value);
  Device::Get().SynchronizeStream(Device::CurrentStream(), SyncReason::kItem);
  return value.item();
}

}  // namespace sim

// The Python object called Slot. See bindings.cc.
#ifndef OFFLOAD_CSRC_SLOT_HANDLE_H_
#define OFFLOAD_CSRC_SLOT_HANDLE_H_

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "arena.h"

namespace offload {

namespace py = pybind11;

// A share of the memory, which release() lets go of.
//
// Buffers exported from it share the memory through a lease of their own. torch.frombuffer gives
// its Py_buffer back at once and keeps only the exporting object, so that object, not the
// Py_buffer, must stand for the use: it is a capsule that holds the lease, and the tensor holds the
// capsule.
class SlotHandle {
 public:
  explicit SlotHandle(std::shared_ptr<Slot> slot) : slot_(std::move(slot)) {}

  const std::shared_ptr<Slot>& Get() const {
    if (!slot_) throw py::value_error("the slot has been released already");
    slot_->owner().Require("the slot");
    return slot_;
  }

  uintptr_t Address() const { return reinterpret_cast<uintptr_t>(Get()->data()); }
  size_t Nbytes() const { return Get()->nbytes(); }

  void Release() {
    Get();
    if (!lease_.expired()) {
      throw py::buffer_error("the slot is in use: a buffer or tensor still views its memory");
    }
    slot_.reset();
  }

  // Implements PyBufferProcs.bf_getbuffer.
  static int GetBuffer(PyObject* self, Py_buffer* view, int flags) noexcept {
    view->obj = nullptr;
    try {
      auto& handle = py::cast<SlotHandle&>(py::handle(self));
      const std::shared_ptr<Slot> slot = handle.Get();
      const py::object exporter = handle.Lease();
      return PyBuffer_FillInfo(view, exporter.ptr(), slot->data(),
                               static_cast<Py_ssize_t>(slot->nbytes()), /*readonly=*/0, flags);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_BufferError, error.what());
      return -1;
    }
  }

 private:
  using LeaseHolder = std::shared_ptr<std::shared_ptr<Slot>>;

  // A capsule that owns a share of the lease all current exports have in common.
  py::object Lease() {
    LeaseHolder lease = lease_.lock();
    if (!lease) {
      lease = std::make_shared<std::shared_ptr<Slot>>(slot_);
      lease_ = lease;
    }
    auto owned = std::make_unique<LeaseHolder>(std::move(lease));
    py::capsule capsule(owned.get(), [](void* pointer) {
      const std::unique_ptr<LeaseHolder> dropped(static_cast<LeaseHolder*>(pointer));
    });
    static_cast<void>(owned.release());  // the capsule's now
    return capsule;
  }

  std::shared_ptr<Slot> slot_;
  std::weak_ptr<std::shared_ptr<Slot>> lease_;
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_SLOT_HANDLE_H_

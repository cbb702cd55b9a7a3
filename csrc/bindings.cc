// The Python face of the engine: offload._native. Its contract is offload/_native.pyi.
//
// Only this file and slot_handle.h know Python. Whatever waits or moves many bytes releases the
// GIL, and waits in slices so that Ctrl-C is noticed. Failures of the operating system become
// OSError with errno.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "arena.h"
#include "checksum.h"
#include "copy.h"
#include "file.h"
#include "interpose.h"
#include "queue.h"
#include "slot_handle.h"

namespace offload {
namespace {

using std::chrono::nanoseconds;

constexpr nanoseconds kSlice = std::chrono::milliseconds(50);

// Calls `poll(slice)` without the GIL until it returns something true or `timeout` is over, and
// returns its last result. Runs signal handlers in between.
template <typename Poll>
auto PollInterruptibly(nanoseconds timeout, Poll poll) {
  for (;;) {
    const nanoseconds slice = std::min(timeout, kSlice);
    {
      const py::gil_scoped_release no_gil;
      if (auto result = poll(slice); result || timeout <= kSlice) return result;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout != nanoseconds::max()) timeout -= slice;
  }
}

nanoseconds ToTimeout(std::optional<double> seconds) {
  if (!seconds) return nanoseconds::max();
  if (std::isnan(*seconds) || *seconds < 0) {
    throw py::value_error("timeout_seconds must not be negative");
  }
  constexpr double kLongestSeconds = 1e9;  // 30 years
  if (*seconds > kLongestSeconds) return nanoseconds::max();
  return nanoseconds(static_cast<int64_t>(*seconds * 1e9));
}

// The Python object called Queue: closing and dying wait for the disk, so both let the GIL go.
class QueueHandle {
 public:
  QueueHandle(std::shared_ptr<File> file, const Queue::Options& options)
      : queue_(std::make_unique<Queue>(std::move(file), options)) {}

  // NOLINTNEXTLINE(bugprone-exception-escape): nothing to unwind to if the GIL cannot be let go
  ~QueueHandle() {
    const py::gil_scoped_release no_gil;
    queue_.reset();
  }

  std::shared_ptr<Request> Submit(const Transfer& transfer) {
    // Mostly there is room, and then nothing to wait for.
    if (auto request = queue_->Submit(transfer, nanoseconds::zero())) return request;
    return PollInterruptibly(nanoseconds::max(),
                             [&](nanoseconds slice) { return queue_->Submit(transfer, slice); });
  }

  void Close() {
    PollInterruptibly(nanoseconds::max(), [&](nanoseconds slice) { return queue_->Close(slice); });
  }

  py::dict Stats() const {
    const Queue::Stats stats = queue_->GetStats();
    py::dict result;
    result["read_bytes"] = stats.read_bytes;
    result["written_bytes"] = stats.written_bytes;
    result["reads"] = stats.reads;
    result["writes"] = stats.writes;
    result["read_ns"] = stats.read_ns;
    result["write_ns"] = stats.write_ns;
    result["cpu_ns"] = stats.cpu_ns;
    result["depth"] = stats.depth;
    result["peak_depth"] = stats.peak_depth;
    return result;
  }

 private:
  std::unique_ptr<Queue> queue_;
};

// Python's integers are signed: without this a negative size would be a TypeError that names no
// argument.
size_t ToSize(int64_t value, const char* name) {
  if (value < 0) throw py::value_error(std::string(name) + " must not be negative");
  return static_cast<size_t>(value);
}

void* ToPointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

void RequireRange(uintptr_t address, size_t nbytes, const char* name) {
  if (nbytes > 0 && address == 0) throw py::value_error(std::string(name) + " is null");
  if (nbytes > std::numeric_limits<uintptr_t>::max() - address) {
    throw py::value_error(std::string(name) + " + nbytes exceeds the address space");
  }
}

void RequireCopyable(uintptr_t dst, uintptr_t src, size_t nbytes, int threads) {
  RequireRange(dst, nbytes, "dst");
  RequireRange(src, nbytes, "src");
  if (nbytes > 0 && dst < src + nbytes && src < dst + nbytes) {
    throw py::value_error("dst and src overlap");
  }
  if (threads < 1) throw py::value_error("threads must be at least 1");
}

void BindMemory(py::module_& module) {
  module.def(
      "copy",
      [](uintptr_t dst, uintptr_t src, int64_t size, int threads) {
        const size_t nbytes = ToSize(size, "nbytes");
        RequireCopyable(dst, src, nbytes, threads);
        const py::gil_scoped_release no_gil;
        Copy(ToPointer(dst), ToPointer(src), nbytes, threads);
      },
      py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("threads") = kDefaultCopyThreads,
      "Copy nbytes between two addresses that do not overlap.");
  module.def(
      "copy_crc32c",
      [](uintptr_t dst, uintptr_t src, int64_t size, int threads) {
        const size_t nbytes = ToSize(size, "nbytes");
        RequireCopyable(dst, src, nbytes, threads);
        const py::gil_scoped_release no_gil;
        return CopyCrc32c(ToPointer(dst), ToPointer(src), nbytes, threads);
      },
      py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("threads") = kDefaultCopyThreads,
      "Copy like copy() and return the CRC-32C of the bytes; they are read only once.");
  module.def(
      "crc32c",
      [](uintptr_t address, int64_t size) {
        const size_t nbytes = ToSize(size, "nbytes");
        RequireRange(address, nbytes, "address");
        const py::gil_scoped_release no_gil;
        return Crc32c(0, ToPointer(address), nbytes);
      },
      py::arg("address"), py::arg("nbytes"), "Return the CRC-32C of nbytes at an address.");
}

void BindPool(py::module_& module) {
  module.def("use_pool_for_torch", &UsePoolForTorch, py::call_guard<py::gil_scoped_release>(),
             "Put the pool under torch's CPU allocator; why it cannot be, or an empty text.");
  module.def(
      "begin_pool_period",
      [] {
        if (Pool* const pool = TorchPool()) pool->BeginPeriod();
      },
      "Tell the pool, if there is one, that a training step begins.");
  module.def(
      "pool_stats",
      []() -> std::optional<py::dict> {
        const Pool* const pool = TorchPool();
        if (pool == nullptr) return std::nullopt;
        const Pool::Stats stats = pool->GetStats();
        py::dict result;
        result["used_bytes"] = stats.used_bytes;
        result["most_bytes"] = stats.most_bytes;
        result["kept_bytes"] = stats.kept_bytes;
        result["allocations"] = stats.allocations;
        return result;
      },
      "Figures of the pool, or None where there is none.");
}

void BindArena(py::module_& module) {
  py::class_<SlotHandle>(module, "Slot", py::custom_type_setup([](PyHeapTypeObject* type) {
                           type->as_buffer.bf_getbuffer = &SlotHandle::GetBuffer;
                           type->ht_type.tp_as_buffer = &type->as_buffer;
                         }),
                         "Page-aligned host memory; a writable buffer of bytes.")
      .def_property_readonly("address", &SlotHandle::Address, "Where it begins, page aligned.")
      .def_property_readonly("nbytes", &SlotHandle::Nbytes, "What was asked for.")
      .def("release", &SlotHandle::Release,
           "Give the memory back now. ValueError the second time; BufferError while in use.");

  py::class_<Arena>(module, "Arena", "A slab of huge pages that is cut into slots.")
      .def(py::init([](int64_t capacity_bytes, bool prefault) {
             return std::make_unique<Arena>(ToSize(capacity_bytes, "capacity_bytes"), prefault);
           }),
           py::arg("capacity_bytes"), py::kw_only(), py::arg("prefault") = true)
      .def_property_readonly("capacity_bytes", &Arena::capacity_bytes)
      .def_property_readonly("used_bytes", [](const Arena& a) { return a.GetStats().used_bytes; })
      .def_property_readonly("peak_bytes", [](const Arena& a) { return a.GetStats().peak_bytes; })
      .def_property_readonly("live_slots", [](const Arena& a) { return a.GetStats().live_slots; })
      .def_property_readonly("page_bytes", [](const Arena& a) { return a.GetStats().page_bytes; })
      .def_property_readonly("outside_bytes",
                             [](const Arena& a) { return a.GetStats().outside_bytes; })
      .def_property_readonly("held_bytes",
                             [](const Arena& a) {
                               const Arena::Stats stats = a.GetStats();
                               return stats.used_bytes + stats.outside_bytes;
                             })
      .def(
          "allocate",
          [](Arena& arena, int64_t nbytes) -> std::unique_ptr<SlotHandle> {
            std::shared_ptr<Slot> slot = arena.Allocate(ToSize(nbytes, "nbytes"));
            return slot ? std::make_unique<SlotHandle>(std::move(slot)) : nullptr;
          },
          py::arg("nbytes"), "Return a Slot, or None when there is no room now.")
      .def(
          "allocate_outside",
          [](Arena& arena, int64_t nbytes) {
            return std::make_unique<SlotHandle>(arena.AllocateOutside(ToSize(nbytes, "nbytes")));
          },
          py::arg("nbytes"), "Return a Slot with a mapping of its own, beyond the capacity.")
      .def(
          "trim",
          [](Arena& arena, int64_t keep_bytes) { arena.Trim(ToSize(keep_bytes, "keep_bytes")); },
          py::arg("keep_bytes"), py::call_guard<py::gil_scoped_release>(),
          "Give back to the system what is free beyond the first bytes.")
      .def("close", &Arena::Close, py::call_guard<py::gil_scoped_release>(),
           "End allocation and return how many slots are still alive.");
}

void BindFile(py::module_& module) {
  py::class_<File, std::shared_ptr<File>>(module, "File", "A nameless scratch file.")
      // A path as Python converts one: its bytes need not be text in any coding.
      .def(py::init([](const std::filesystem::path& directory, bool direct) {
             return std::make_shared<File>(directory.native(), direct);
           }),
           py::arg("directory"), py::kw_only(), py::arg("direct") = true,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("alignment_bytes", &File::alignment_bytes)
      .def_property_readonly("is_direct", &File::is_direct)
      .def_property_readonly("allocated_bytes", &File::allocated_bytes)
      .def(
          "reserve",
          [](File& file, int64_t end_bytes) {
            const size_t end = ToSize(end_bytes, "end_bytes");
            const py::gil_scoped_release no_gil;
            file.Reserve(end);
          },
          py::arg("end_bytes"), "Give [0, end_bytes) its disk space.");
}

void BindQueue(py::module_& module) {
  py::class_<Request, std::shared_ptr<Request>>(module, "Request", "A transfer that was accepted.")
      .def("done", &Request::Done)
      .def(
          "wait",
          [](const std::shared_ptr<Request>& request, std::optional<double> timeout_seconds) {
            const nanoseconds timeout = ToTimeout(timeout_seconds);
            if (request->Done()) return request->Wait(timeout);
            return PollInterruptibly(timeout,
                                     [&](nanoseconds slice) { return request->Wait(slice); });
          },
          py::arg("timeout_seconds") = py::none(),
          "Wait until it is done; False on timeout, OSError if the transfer failed.")
      .def("cancel", &Request::Cancel, "True if it had not begun: it then never runs.")
      .def("promote", &Request::Promote, "Make a waiting read urgent.")
      .def_property_readonly("start_ns", &Request::start_ns)
      .def_property_readonly("end_ns", &Request::end_ns)
      .def_property_readonly("nbytes", &Request::nbytes)
      .def_property_readonly("offset", &Request::offset);

  const Queue::Options defaults;
  py::class_<QueueHandle>(module, "Queue", "A bounded queue served by a few threads.")
      .def(py::init(
               [](std::shared_ptr<File> file, int threads, int64_t block_bytes, int64_t capacity) {
                 const Queue::Options options{threads, ToSize(block_bytes, "block_bytes"),
                                              ToSize(capacity, "capacity")};
                 return std::make_unique<QueueHandle>(std::move(file), options);
               }),
           py::arg("file"), py::kw_only(), py::arg("threads") = defaults.threads,
           py::arg("block_bytes") = defaults.block_bytes, py::arg("capacity") = defaults.capacity)
      .def(
          "write",
          [](QueueHandle& queue, const SlotHandle& slot, int64_t offset) {
            return queue.Submit({Transfer::Kind::kWrite, slot.Get(), ToSize(offset, "offset"),
                                 /*urgent=*/false, std::nullopt});
          },
          py::arg("slot"), py::arg("offset"), "Write a slot; waits while the queue is full.")
      .def(
          "read",
          [](QueueHandle& queue, const SlotHandle& slot, int64_t offset, bool urgent,
             std::optional<uint32_t> crc) {
            return queue.Submit(
                {Transfer::Kind::kRead, slot.Get(), ToSize(offset, "offset"), urgent, crc});
          },
          py::arg("slot"), py::arg("offset"), py::kw_only(), py::arg("urgent") = false,
          py::arg("crc") = py::none(), "Read into a slot; waits while the queue is full.")
      .def("stats", &QueueHandle::Stats)
      .def("close", &QueueHandle::Close, "Finish what was accepted, then end the workers.");
}

// Calls a function when it dies. Where `__del__` does, Python first raises a Ctrl-C that has come
// meanwhile, and drops it.
struct Finally {
  py::object function, argument;
  Finally(py::object f, py::object a) : function(std::move(f)), argument(std::move(a)) {}
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;
  ~Finally() {
    PyObject* const result = PyObject_CallOneArg(function.ptr(), argument.ptr());
    if (result == nullptr) PyErr_WriteUnraisable(function.ptr());
    Py_XDECREF(result);
  }
};

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native engine: a page-aligned arena, a scratch file, a bounded I/O queue.";
  // NOLINTNEXTLINE(performance-unnecessary-value-param): the signature is pybind11's
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      // The message names a directory, whose bytes need not be text.
      const auto what = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(error.what()));
      const py::tuple arguments = py::make_tuple(error.code().value(), what);
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
  py::class_<Finally>(module, "Finally").def(py::init<py::object, py::object>());
  BindMemory(module);
  BindPool(module);
  BindArena(module);
  BindFile(module);
  BindQueue(module);
}

}  // namespace offload

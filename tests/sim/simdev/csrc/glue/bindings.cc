// The Python face of the device: the module _simdev, which the package simdev wraps.
//
// Whatever can run or wait for tasks releases the GIL: destroying what a task holds may need it.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include "glue/allocators.h"
#include "glue/fallback.h"
#include "glue/generator.h"
#include "runtime/device.h"

namespace py = pybind11;

namespace sim {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void Reset() {
  // Once nothing is in flight every block that torch caches can go.
  Device::Get().Configure(Config());
  PinnedMemoryAllocator().empty_cache();
  Device::Get().Reset();
  ResetOperatorCounts();
}

void BindConfig(py::module_& m) {
  py::class_<Config>(m, "Config")
      .def(py::init<>())
      .def_property(
          "scheduler", [](const Config& config) { return static_cast<int>(config.scheduler); },
          [](Config& config, int value) { config.scheduler = static_cast<Scheduler>(value); })
      .def_readwrite("seed", &Config::seed)
      .def_readwrite("async_operators", &Config::async_operators)
      .def_readwrite("detect_races", &Config::detect_races)
      .def_readwrite("poison", &Config::poison)
      .def_readwrite("guard_host", &Config::guard_host)
      .def_readwrite("d2h_bytes_per_s", &Config::d2h_bytes_per_s)
      .def_readwrite("h2d_bytes_per_s", &Config::h2d_bytes_per_s)
      .def_readwrite("hbm_bytes_per_s", &Config::hbm_bytes_per_s)
      .def_readwrite("flops_per_s", &Config::flops_per_s)
      .def_readwrite("launch_ns", &Config::launch_ns)
      .def_readwrite("copy_latency_ns", &Config::copy_latency_ns)
      .def_readwrite("min_kernel_ns", &Config::min_kernel_ns)
      .def_readwrite("timed_queries", &Config::timed_queries)
      .def_readwrite("sleep_scale", &Config::sleep_scale)
      .def_readwrite("capacity_bytes", &Config::capacity_bytes);
  m.def("config", [] { return Device::Get().config(); });
  m.def(
      "configure", [](const Config& config) { Device::Get().Configure(config); }, NoGil());
  m.def("reset", &Reset, NoGil());
  m.def(
      "shutdown", [] { Device::Get().Shutdown(); }, NoGil());
}

void BindStats(py::module_& m) {
  py::class_<MemoryStats>(m, "MemoryStats")
      .def_readonly("current_bytes", &MemoryStats::current_bytes)
      .def_readonly("peak_bytes", &MemoryStats::peak_bytes);
  py::class_<Counters>(m, "Counters")
      .def_readonly("syncs", &Counters::syncs)
      .def_readonly("d2h_copies", &Counters::d2h_copies)
      .def_readonly("d2h_bytes", &Counters::d2h_bytes)
      .def_readonly("h2d_copies", &Counters::h2d_copies)
      .def_readonly("h2d_bytes", &Counters::h2d_bytes)
      .def_readonly("kernels", &Counters::kernels)
      .def_readonly("tasks_run", &Counters::tasks_run);
  py::class_<OperatorCounts>(m, "OperatorCounts")
      .def_readonly("asynchronous", &OperatorCounts::asynchronous)
      .def_readonly("synchronous", &OperatorCounts::synchronous)
      .def_readonly("why_synchronous", &OperatorCounts::why_synchronous);
  m.def("counters", [] { return Device::Get().counters(); });
  m.def("operator_counts", &GetOperatorCounts);
  m.def("allocated", [] { return Device::Get().allocated(); });
  m.def("reserved", [] { return Device::Get().reserved(); });
  m.def("pinned", [] { return Device::Get().pinned(); });
}

void BindInstruments(py::module_& m) {
  m.def("races", [](bool clear) { return Device::Get().Races(clear); });
  m.def("host_access",
        [](uintptr_t address, size_t nbytes, bool is_write, const std::string& what) {
          Device::Get().HostAccess(PointerTo(address), nbytes, is_write, what);
        });
  m.def("host_register", [](uintptr_t address, size_t nbytes) {
    return Device::Get().Register(PointerTo(address), nbytes);
  });
  m.def("host_unregister",
        [](uintptr_t address) { return Device::Get().Unregister(PointerTo(address)); });
  m.def("own_host_clock", [] { Device::Get().OwnHostClock(); });
  m.def("shared_host_clock", [] { Device::Get().SharedHostClock(); });
  m.def("host_release", [](uint64_t token) { Device::Get().HostRelease(token); });
  m.def("host_acquire", [](uint64_t token) { Device::Get().HostAcquire(token); });
  m.def("all_done_ns", [] { return Device::Get().AllDoneNs(); });
  m.def("host_ns", [] { return Device::Get().HostNs(); });
  m.def("advance_host", [](int64_t duration_ns) { Device::Get().AdvanceHost(duration_ns); });
  m.def("inject_copy_fault", [](bool is_d2h, int nth) {
    Device::Get().InjectFault(is_d2h ? TaskKind::kD2H : TaskKind::kH2D, nth);
  });
}

void BindGenerator(py::module_& m) {
  m.def("manual_seed", [](uint64_t seed) {
    at::Generator generator = DefaultGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  });
  m.def("get_rng_state", [] { return DefaultGenerator().get_state(); });
  m.def("set_rng_state", [](const at::Tensor& state) {
    at::Generator generator = DefaultGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  });
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(_simdev, m) {
  sim::Device::Get();  // fails here, if at all
  sim::BindConfig(m);
  sim::BindStats(m);
  sim::BindInstruments(m);
  sim::BindGenerator(m);
}

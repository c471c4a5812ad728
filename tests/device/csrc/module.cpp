// The Python module of the device. tests/device/sim.py wraps it.
#include "device.h"

#include <torch/extension.h>

namespace simulated {

void register_region_kernels();  // region_kernels.cpp
void forget_region_kernels();
void register_elementwise_kernel();  // elementwise_kernel.cpp
void forget_elementwise_kernel();
at::Generator generator_of(c10::DeviceIndex device);  // runtime.cpp

namespace {

std::unordered_map<std::string, int64_t> counts() {
  std::unordered_map<std::string, int64_t> out;
  for (int k = 0; k < kCounters; ++k) {
    const auto counter = static_cast<Counter>(k);
    out[name_of(counter)] = count_of(counter);
  }
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("counts", &counts);
  m.def("counts_by_op", &counts_by_op);
  m.def("clear_counts", &clear_counts);
  m.def("forbid_synchronisation", &forbid_synchronisation);
  m.def("allocated_bytes", &allocated_bytes);
  m.def("watch_faults", &watch_faults);
  m.def("register_region_kernels", &register_region_kernels);
  m.def("forget_region_kernels", &forget_region_kernels);
  m.def("register_elementwise_kernel", &register_elementwise_kernel);
  m.def("forget_elementwise_kernel", &forget_elementwise_kernel);
  m.def("generator_of", &generator_of);
  m.attr("DEVICES") = kDevices;
  py::enum_<Fault>(m, "Fault")
      .value("NONE", Fault::kNone)
      .value("FORGET_RECORD_STREAM", Fault::kForgetRecordStream)
      .value("FORGET_EVENTS", Fault::kForgetEvents);
  m.def("plant", &plant);
}

}  // namespace simulated

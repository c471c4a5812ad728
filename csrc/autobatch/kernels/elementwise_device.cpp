#include "autobatch/kernels/elementwise_device.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/cpu_dispatch.h"

#include <array>

namespace autobatch {
namespace {

DeviceElementwise& kernel_of(c10::DeviceType type) {
  static std::array<DeviceElementwise, c10::COMPILE_TIME_MAX_DEVICE_TYPES> kernels = [] {
    std::array<DeviceElementwise, c10::COMPILE_TIME_MAX_DEVICE_TYPES> of_ours{};
#if AUTOBATCH_WITH_CUDA
    of_ours[static_cast<size_t>(c10::DeviceType::CUDA)] = {cuda::has_elementwise_kernel,
                                                           cuda::run_elementwise};
#endif
    return of_ours;
  }();
  return kernels[static_cast<size_t>(type)];
}

}  // namespace

void register_elementwise_kernel(c10::DeviceType type, const DeviceElementwise& kernel) {
  kernel_of(type) = kernel;
}

bool has_elementwise_kernel(c10::Device device, c10::ScalarType dtype) {
  if (has_host_memory(device)) return has_cpu_kernels(dtype);
  const auto has_kernel = kernel_of(device.type()).has_kernel;
  return has_kernel != nullptr && has_kernel(device, dtype);
}

void run_elementwise(const ElementwiseProgram& program, c10::Device device) {
  has_host_memory(device) ? run_elementwise(program)
                          : kernel_of(device.type()).run(program, device);
}

}  // namespace autobatch

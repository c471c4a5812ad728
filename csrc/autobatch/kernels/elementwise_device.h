// Runs elementwise programs (elementwise_program.h) on any device that has a kernel for them.
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/elementwise_program.h"

#include <c10/core/Device.h>

namespace autobatch {

bool has_elementwise_kernel(c10::Device device, c10::ScalarType dtype);
void run_elementwise(const ElementwiseProgram& program, c10::Device device);

// The kernel of an accelerator. The kernel must be registered before the first tensor of the device
// is captured.
struct DeviceElementwise {
  bool (*has_kernel)(c10::Device device, c10::ScalarType dtype) = nullptr;
  void (*run)(const ElementwiseProgram& program, c10::Device device) = nullptr;
};
AUTOBATCH_INTERNAL void register_elementwise_kernel(c10::DeviceType type,
                                                    const DeviceElementwise& kernel);

namespace cuda {
bool has_elementwise_kernel(c10::Device device, c10::ScalarType dtype);
void run_elementwise(const ElementwiseProgram& program, c10::Device device);
}  // namespace cuda

}  // namespace autobatch

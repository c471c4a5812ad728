// Elementwise passes (fused_elementwise.h) on any device that has a kernel for them.
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/fused_elementwise.h"

#include <c10/core/Device.h>

namespace autobatch {

bool has_pointwise_kernel(c10::Device device, c10::ScalarType dtype);
void run_pointwise(const PointwiseProgram& program, c10::Device device);

// The kernel of an accelerator. It must be registered before the first tensor of the device is
// captured.
struct DevicePointwise {
  bool (*has_kernel)(c10::Device device, c10::ScalarType dtype) = nullptr;
  void (*run)(const PointwiseProgram& program, c10::Device device) = nullptr;
};
AUTOBATCH_INTERNAL void register_pointwise_kernel(c10::DeviceType type,
                                                  const DevicePointwise& kernel);

namespace cuda {
bool has_pointwise_kernel(c10::Device device, c10::ScalarType dtype);
void run_pointwise(const PointwiseProgram& program, c10::Device device);
}  // namespace cuda

}  // namespace autobatch

// gather.h for devices other than the CPU: our own kernels where the library has them, else ATen, a
// call for each region.
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/gather.h"

namespace autobatch {

void gather_on_device(const Regions& regions, const at::Tensor& out);
void scatter_add_on_device(const at::Tensor& values, const Regions& regions);
void copy_regions_on_device(const Regions& from, const Regions& to);
void add_regions_on_device(const Regions& from, const Regions& to);

// By ATen, on any device.
namespace by_aten {
void gather(const Regions& regions, const at::Tensor& out);
void unpack(const at::Tensor& values, const Regions& regions);
void scatter_add(const at::Tensor& values, const Regions& regions);
}  // namespace by_aten

// What an accelerator has of its own for this, each false, with nothing done, where it is not for
// these regions. A device's are registered before its first tensor is captured.
struct RegionKernels {
  bool (*gather)(const Regions& regions, const at::Tensor& out) = nullptr;
  bool (*unpack)(const at::Tensor& values, const Regions& regions) = nullptr;
  bool (*scatter_add)(const at::Tensor& values, const Regions& regions) = nullptr;
};
AUTOBATCH_INTERNAL void register_region_kernels(c10::DeviceType type, const RegionKernels& kernels);

// By CUDA kernels; false, with nothing done, where there are none for this.
namespace cuda {
bool gather(const Regions& regions, const at::Tensor& out);
bool unpack(const at::Tensor& values, const Regions& regions);
bool scatter_add(const at::Tensor& values, const Regions& regions);
}  // namespace cuda

}  // namespace autobatch

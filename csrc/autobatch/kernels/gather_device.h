// gather.h for devices other than the CPU: our own kernels where the library has them, else ATen, a
// call for each region.
#pragma once

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

// By CUDA kernels; false, with nothing done, where there are none for this.
namespace cuda {
bool gather(const Regions& regions, const at::Tensor& out);
bool unpack(const at::Tensor& values, const Regions& regions);
bool scatter_add(const at::Tensor& values, const Regions& regions);
}  // namespace cuda

}  // namespace autobatch

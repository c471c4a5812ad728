// The functions of gather.h for devices other than the CPU. The functions use kernels of this
// library if the device has them, and ATen calls otherwise.
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/gather.h"
#include "autobatch/kernels/row_lookups.h"

namespace autobatch {

void gather_on_device(const Regions& regions, const at::Tensor& out);
void scatter_add_on_device(const at::Tensor& values, const Regions& regions);
void copy_regions_on_device(const Regions& from, const Regions& to);
void add_regions_on_device(const Regions& from, const Regions& to);

// Writes the row of each lookup to `out`, one member after the other: int64 [lookups]. For an index
// out of range, writes a row number that no tensor has. Returns false and does nothing if the
// device has no kernel for lookups.
bool find_rows_on_device(const RowQuery& query, const at::Tensor& out);

// Implementations of these functions by ATen calls, for any device.
namespace by_aten {
void gather(const Regions& regions, const at::Tensor& out);
void unpack(const at::Tensor& values, const Regions& regions);
void scatter_add(const at::Tensor& values, const Regions& regions);
}  // namespace by_aten

// Kernels for the regions and rows of one type of accelerator. Each kernel returns false and does
// nothing if it does not support its arguments. The kernels must be registered before the first
// tensor of the device is captured.
struct RegionKernels {
  bool (*gather)(const Regions& regions, const at::Tensor& out) = nullptr;
  bool (*unpack)(const at::Tensor& values, const Regions& regions) = nullptr;
  bool (*scatter_add)(const at::Tensor& values, const Regions& regions) = nullptr;
  bool (*find_rows)(const RowQuery& query, const at::Tensor& out) = nullptr;
};
AUTOBATCH_INTERNAL void register_region_kernels(c10::DeviceType type, const RegionKernels& kernels);

// CUDA kernels. Each function returns false and does nothing if it does not support its arguments.
namespace cuda {
bool gather(const Regions& regions, const at::Tensor& out);
bool unpack(const at::Tensor& values, const Regions& regions);
bool scatter_add(const at::Tensor& values, const Regions& regions);
bool find_rows(const RowQuery& query, const at::Tensor& out);
}  // namespace cuda

}  // namespace autobatch

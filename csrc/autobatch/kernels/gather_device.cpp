#include "autobatch/kernels/gather_device.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <vector>

namespace autobatch {
namespace by_aten {
namespace {

// Adds `values` to a region whose elements share memory. The values are added by index, because an
// ordinary addition would keep only one of the values for each address.
void add_by_index(const at::Tensor& values, const Region& region) {
  const Geometry& g = *region.geometry;
  const at::Tensor memory =
      region.buffer->as_strided({g.extent}, {1}, region.buffer->storage_offset() + region.offset);
  const at::Tensor numbers = at::arange(g.extent, values.options().dtype(at::kLong));
  const at::Tensor index = numbers.as_strided(g.sizes, g.strides).reshape({-1});
  at::Tensor(memory).index_add_(0, index, values.reshape({-1}));
}

// Calls visit(region, part of `values` for the region) for each region.
template <class Visit>
void for_each_part(const at::Tensor& values, const Regions& regions, const Visit& visit) {
  const at::Tensor flat = values.view({-1});
  int64_t start = 0;
  for (const Region& region : regions) {
    const int64_t length = region.geometry->numel;
    if (region.buffer != nullptr && length > 0) {
      visit(region, flat.narrow(0, start, length).view(region.geometry->sizes));
    }
    start += length;
  }
}

}  // namespace

// Makes one call of ATen if all regions are contiguous, and otherwise one call for each region.
void gather(const Regions& regions, const at::Tensor& out) {
  const bool joins = regions.size() > 1 && std::ranges::all_of(regions, [](const Region& region) {
                       return region.buffer != nullptr && region.geometry->contiguous;
                     });
  if (joins) {
    std::vector<at::Tensor> parts;
    parts.reserve(regions.size());
    for (const Region& region : regions) {
      parts.push_back(dense_view(*region.buffer, {region.geometry->numel}, region.offset));
    }
    at::Tensor flat = out.view({-1});
    at::cat_out(flat, parts);
    return;
  }
  for_each_part(out, regions, [](const Region& region, const at::Tensor& part) {
    part.copy_(region_view(region));
  });
}

void unpack(const at::Tensor& values, const Regions& regions) {
  for_each_part(values, regions, [](const Region& region, const at::Tensor& part) {
    region_view(region).copy_(part);
  });
}

void scatter_add(const at::Tensor& values, const Regions& regions) {
  for_each_part(values, regions, [](const Region& region, const at::Tensor& part) {
    if (region.geometry->overlapping) return add_by_index(part, region);
    region_view(region).add_(part);
  });
}

}  // namespace by_aten

namespace {

constexpr size_t kTypes = c10::COMPILE_TIME_MAX_DEVICE_TYPES;

std::array<RegionKernels, kTypes>& kernels_by_type() {
  static std::array<RegionKernels, kTypes> kernels = [] {
    std::array<RegionKernels, kTypes> of_ours{};
#if AUTOBATCH_WITH_CUDA
    of_ours[static_cast<size_t>(at::kCUDA)] = {cuda::gather, cuda::unpack, cuda::scatter_add,
                                               cuda::find_rows};
#endif
    return of_ours;
  }();
  return kernels;
}

const RegionKernels& kernels_of(const at::Tensor& tensor) {
  return kernels_by_type()[static_cast<size_t>(tensor.device().type())];
}

at::Tensor packed(const Regions& regions) {
  int64_t numel = 0;
  for (const Region& region : regions) numel += region.geometry->numel;
  const at::Tensor out = at::empty({numel}, regions.front().buffer->options());
  gather_on_device(regions, out);
  return out;
}

}  // namespace

void register_region_kernels(c10::DeviceType type, const RegionKernels& kernels) {
  kernels_by_type()[static_cast<size_t>(type)] = kernels;
}

void gather_on_device(const Regions& regions, const at::Tensor& out) {
  const auto gather = kernels_of(out).gather;
  if (gather == nullptr || !gather(regions, out)) by_aten::gather(regions, out);
}

void scatter_add_on_device(const at::Tensor& values, const Regions& regions) {
  const auto scatter_add = kernels_of(values).scatter_add;
  if (scatter_add == nullptr || !scatter_add(values, regions)) {
    by_aten::scatter_add(values, regions);
  }
}

void copy_regions_on_device(const Regions& from, const Regions& to) {
  const at::Tensor values = packed(from);
  const auto unpack = kernels_of(values).unpack;
  if (unpack == nullptr || !unpack(values, to)) by_aten::unpack(values, to);
}

bool find_rows_on_device(const RowQuery& query, const at::Tensor& out) {
  const auto find_rows = kernels_of(out).find_rows;
  return find_rows != nullptr && find_rows(query, out);
}

void add_regions_on_device(const Regions& from, const Regions& to) {
  scatter_add_on_device(packed(from), to);
}

}  // namespace autobatch

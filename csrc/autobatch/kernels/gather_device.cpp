#include "autobatch/kernels/gather_device.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

namespace autobatch {
namespace by_aten {
namespace {

// Where elements of the region share memory, each of their values is added: by index, for an
// ordinary addition would keep one of them.
void add_by_index(const at::Tensor& values, const Region& region) {
  const Geometry& g = *region.geometry;
  const at::Tensor memory =
      region.buffer->as_strided({g.extent}, {1}, region.buffer->storage_offset() + region.offset);
  const at::Tensor numbers = at::arange(g.extent, values.options().dtype(at::kLong));
  const at::Tensor index = numbers.as_strided(g.sizes, g.strides).reshape({-1});
  at::Tensor(memory).index_add_(0, index, values.reshape({-1}));
}

// Calls visit(region, its part of the values).
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

void gather(const Regions& regions, const at::Tensor& out) {
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

#if !AUTOBATCH_WITH_CUDA
namespace cuda {
bool gather(const Regions&, const at::Tensor&) { return false; }
bool unpack(const at::Tensor&, const Regions&) { return false; }
bool scatter_add(const at::Tensor&, const Regions&) { return false; }
}  // namespace cuda
#endif

namespace {

at::Tensor packed(const Regions& regions) {
  int64_t numel = 0;
  for (const Region& region : regions) numel += region.geometry->numel;
  const at::Tensor out = at::empty({numel}, regions.front().buffer->options());
  gather_on_device(regions, out);
  return out;
}

}  // namespace

void gather_on_device(const Regions& regions, const at::Tensor& out) {
  if (!cuda::gather(regions, out)) by_aten::gather(regions, out);
}

void scatter_add_on_device(const at::Tensor& values, const Regions& regions) {
  if (!cuda::scatter_add(values, regions)) by_aten::scatter_add(values, regions);
}

void copy_regions_on_device(const Regions& from, const Regions& to) {
  const at::Tensor values = packed(from);
  if (!cuda::unpack(values, to)) by_aten::unpack(values, to);
}

void add_regions_on_device(const Regions& from, const Regions& to) {
  scatter_add_on_device(packed(from), to);
}

}  // namespace autobatch

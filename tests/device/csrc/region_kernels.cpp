// The device's kernels for regions: one launch copies or adds all regions of a table.
#include "autobatch/kernels/cuda/gather.h"
#include "autobatch/kernels/cuda/row_plan.h"
#include "autobatch/kernels/gather_device.h"
#include "launch.h"

#include <ATen/ATen.h>
#include <ATen/ops/as_strided_native.h>

namespace simulated {

// Runs the CUDA kernel, compiled for the CPU (cuda_kernels.cpp).
int find_rows_on_cpu(const autobatch::cuda::SentRows& rows, int64_t* out);

namespace {

using autobatch::Region;
using autobatch::Regions;

// Whether all regions have the device and dtype of `packed`, as gather_cuda.cpp requires.
bool all_on(const Regions& regions, const at::Tensor& packed) {
  return packed.is_contiguous() &&
         std::all_of(regions.begin(), regions.end(), [&](const Region& region) {
           return region.buffer == nullptr || (region.buffer->device() == packed.device() &&
                                               region.buffer->dtype() == packed.dtype());
         });
}

at::Tensor view_of(const Region& region) {
  const at::Tensor& buffer = *region.buffer;
  return at::native::as_strided_tensorimpl(buffer, region.geometry->sizes, region.geometry->strides,
                                           buffer.storage_offset() + region.offset);
}

// Calls visit(region, its memory, its part of `packed`) for all regions in one launch.
template <class Visit>
void launch_over(const char* op, const at::Tensor& packed, const Regions& regions, bool reads,
                 const Visit& visit) {
  Launch launch(op, packed.device());
  // On CUDA a small table is a parameter of the kernel and needs no copy.
  if (regions.size() * sizeof(autobatch::cuda::Entry) > autobatch::cuda::kMostParameterBytes) {
    count(kToDevice, "a table of regions");
  }
  const at::Tensor flat = launch.argument(packed, reads).view(-1);
  int64_t start = 0;
  for (const Region& region : regions) {
    const int64_t length = region.geometry->numel;
    if (region.buffer != nullptr && length > 0) {
      const at::Tensor memory = launch.argument(view_of(region), !reads);
      visit(region, memory, flat.narrow(0, start, length).view(region.geometry->sizes));
    }
    start += length;
  }
}

bool gather(const Regions& regions, const at::Tensor& out) {
  if (!all_on(regions, out)) return false;
  launch_over("autobatch::gather", out, regions, true,
              [](const Region&, const at::Tensor& memory, const at::Tensor& part) {
                at::Tensor(part).copy_(memory);
              });
  return true;
}

bool unpack(const at::Tensor& values, const Regions& regions) {
  if (!all_on(regions, values)) return false;
  launch_over("autobatch::unpack", values, regions, false,
              [](const Region&, const at::Tensor& memory, const at::Tensor& part) {
                at::Tensor(memory).copy_(part);
              });
  return true;
}

bool scatter_add(const at::Tensor& values, const Regions& regions) {
  if (!all_on(regions, values) || !at::isFloatingType(values.scalar_type())) return false;
  launch_over("autobatch::scatter_add", values, regions, false,
              [](const Region& region, const at::Tensor& memory, const at::Tensor& part) {
                if (!region.geometry->overlapping) return void(at::Tensor(memory).add_(part));
                // Several elements of the region may have the same address.
                const int64_t extent = region.geometry->extent;
                const at::Tensor where =
                    at::arange(extent).as_strided(region.geometry->sizes, region.geometry->strides);
                at::Tensor line = memory.as_strided({extent}, {1}, memory.storage_offset());
                line.index_add_(0, where.reshape({-1}), part.reshape({-1}));
              });
  return true;
}

// Runs the kernel with host addresses in place of device addresses.
bool find_rows(const autobatch::RowQuery& query, const at::Tensor& out) {
  std::optional<autobatch::cuda::RowPlan> plan = autobatch::cuda::plan_rows(query);
  if (!plan.has_value()) return false;
  Launch launch("autobatch::find_rows", out.device());
  const autobatch::cuda::RowLayout& layout = plan->layout;
  for (autobatch::cuda::RowEntry& entry : plan->entries) {
    for (int32_t l = 0; l < layout.lists; ++l) {
      autobatch::cuda::RowEntry::List& list = entry.lists[l];
      int64_t last = 0;
      for (int d = 0; d < autobatch::cuda::kMostLookupDims; ++d) {
        last += (entry.sizes[d] - 1) * list.strides[d];
      }
      const int64_t bytes = (last + 1) * (layout.is_int[l] ? 4 : 8);
      const auto* address = reinterpret_cast<const void*>(list.values);
      list.values = reinterpret_cast<uint64_t>(
          launch.memory(address, static_cast<size_t>(bytes), /*writes=*/false));
    }
  }
  autobatch::cuda::SentRows rows{layout, plan->entries.data(), /*on_host=*/true};
  if (rows.num_bytes() > autobatch::cuda::kMostParameterBytes) {
    count(kToDevice, "a table of lookups");
    rows.on_host = false;
  }
  auto* to = launch.argument(out, /*writes=*/true).mutable_data_ptr<int64_t>();
  TORCH_CHECK(find_rows_on_cpu(rows, to) == 0);
  return true;
}

}  // namespace

void register_region_kernels() {
  autobatch::register_region_kernels(kType, {gather, unpack, scatter_add, find_rows});
}

void forget_region_kernels() { autobatch::register_region_kernels(kType, {}); }

}  // namespace simulated

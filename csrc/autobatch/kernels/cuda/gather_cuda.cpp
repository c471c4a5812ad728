// The cuda:: functions of gather_device.h, for builds with CUDA.
#include "autobatch/kernels/cuda/cuda_device.h"
#include "autobatch/kernels/cuda/elementwise_plan.h"
#include "autobatch/kernels/cuda/gather.h"
#include "autobatch/kernels/cuda/region_table.h"
#include "autobatch/kernels/cuda/row_plan.h"
#include "autobatch/kernels/gather_device.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace autobatch::cuda {
namespace {

// Whether the kernels can be used on the current device and stream. The kernels can't be used while
// a CUDA graph is captured. Each replay of the CUDA graph would copy the table from the same host
// memory again, but at that time this memory may contain other data.
bool can_launch() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None &&
         has_kernels_here();
}

bool all_on(const Regions& regions, const at::Tensor& packed) {
  return packed.is_cuda() && packed.is_contiguous() &&
         std::all_of(regions.begin(), regions.end(), [&](const Region& region) {
           return region.buffer == nullptr || (region.buffer->device() == packed.device() &&
                                               region.buffer->dtype() == packed.dtype());
         });
}

// Returns a copy, on the device, of the bytes that `write` writes. Does not wait for the copy. This
// is safe, because the allocator of pinned memory reuses the source only after the copy is done.
template <class Write>
at::Tensor send(int64_t bytes, c10::Device device, const Write& write) {
  const at::Tensor pinned =
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  write(static_cast<char*>(pinned.mutable_data_ptr()));
  const at::Tensor sent = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  at::Tensor(sent).copy_(pinned, /*non_blocking=*/true);
  return sent;
}

// Calls launch(table, stream) on the current stream.
template <class Launch>
bool run(const std::optional<Plan>& plan, const at::Tensor& packed, const Launch& launch) {
  if (!plan.has_value()) return false;
  if (plan->total == 0) return true;
  const Layout layout = plan->layout();
  const int64_t bytes = layout.num_bytes();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(packed.get_device()).stream();
  int error;
  if (bytes <= kMostParameterBytes) {
    std::array<char, kMostParameterBytes> parameter;
    plan->write(parameter.data());
    error = launch(SentTable{layout, parameter.data(), /*on_host=*/true}, stream);
  } else {
    const at::Tensor sent = send(bytes, packed.device(), [&](char* to) { plan->write(to); });
    const auto* there = static_cast<const char*>(sent.const_data_ptr());
    error = launch(SentTable{layout, there, /*on_host=*/false}, stream);
  }
  C10_CUDA_CHECK(static_cast<cudaError_t>(error));
  return true;
}

}  // namespace

bool gather(const Regions& regions, const at::Tensor& out) {
  if (!all_on(regions, out)) return false;
  const c10::cuda::CUDAGuard device(out.device());
  if (!can_launch()) return false;
  void* packed = out.mutable_data_ptr();
  const std::optional<Plan> plan = plan_copy(regions, out.element_size(), packed, Access::kRead);
  return run(plan, out, [&](const SentTable& table, cudaStream_t stream) {
    return gather(table, plan->unit, packed, stream);
  });
}

bool unpack(const at::Tensor& values, const Regions& regions) {
  if (!all_on(regions, values)) return false;
  const c10::cuda::CUDAGuard device(values.device());
  if (!can_launch()) return false;
  const void* packed = values.const_data_ptr();
  const std::optional<Plan> plan =
      plan_copy(regions, values.element_size(), packed, Access::kWrite);
  return run(plan, values, [&](const SentTable& table, cudaStream_t stream) {
    return unpack(table, plan->unit, packed, stream);
  });
}

bool find_rows(const RowQuery& query, const at::Tensor& out) {
  const c10::cuda::CUDAGuard device(out.device());
  const std::optional<RowPlan> plan = can_launch() ? plan_rows(query) : std::nullopt;
  if (!plan.has_value()) return false;
  SentRows rows{plan->layout, plan->entries.data(), /*on_host=*/true};
  at::Tensor there;
  if (rows.num_bytes() > kMostParameterBytes) {
    there = send(rows.num_bytes(), out.device(), [&](char* to) {
      std::memcpy(to, rows.entries, static_cast<size_t>(rows.num_bytes()));
    });
    rows.entries = static_cast<const RowEntry*>(there.const_data_ptr());
    rows.on_host = false;
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(out.get_device()).stream();
  C10_CUDA_CHECK(
      static_cast<cudaError_t>(find_rows(rows, out.mutable_data_ptr<int64_t>(), stream)));
  return true;
}

bool scatter_add(const at::Tensor& values, const Regions& regions) {
  const std::optional<Element> element = element_of(c10::toRealValueType(values.scalar_type()));
  if (!element.has_value() || !all_on(regions, values)) return false;
  const c10::cuda::CUDAGuard device(values.device());
  if (!can_launch()) return false;
  const bool in_order = at::globalContext().deterministicAlgorithms();
  const void* from = values.const_data_ptr();
  const size_t item = values.element_size();
  const bool is_complex = values.is_complex();
  const std::optional<Plan> plan =
      plan_sums(regions, item, is_complex, from, in_order ? Order::kOfValues : Order::kAny);
  return run(plan, values, [&](const SentTable& table, cudaStream_t stream) {
    const int width = plan->unit / static_cast<int>(is_complex ? item / 2 : item);
    return in_order ? scatter_add_in_order(table, *element, width, from, stream)
                    : scatter_add(table, *element, width, from, stream);
  });
}

}  // namespace autobatch::cuda

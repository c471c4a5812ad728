// The functions of elementwise_device.h for CUDA.
#include "autobatch/kernels/cuda/cuda_device.h"
#include "autobatch/kernels/cuda/elementwise_plan.h"
#include "autobatch/kernels/elementwise_device.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace autobatch::cuda {

bool has_elementwise_kernel(c10::Device device, c10::ScalarType dtype) {
  if (!element_of(dtype).has_value()) return false;
  const c10::cuda::CUDAGuard guard(device);
  return has_kernels_here();
}

void run_elementwise(const ElementwiseProgram& program, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  ElementwisePlan plan = plan_elementwise(program);
  at::Tensor scratch;
  if (plan.scratch_bytes > 0) {
    scratch = at::empty({plan.scratch_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    plan.task.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  }
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(static_cast<cudaError_t>(launch_elementwise(
      plan.task, plan.steps.data(), static_cast<int64_t>(plan.steps.size()), stream.stream())));
}

}  // namespace autobatch::cuda

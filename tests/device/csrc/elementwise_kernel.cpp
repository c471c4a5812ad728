// The device's kernel for elementwise programs: the CUDA kernel, compiled for the CPU.
#include "autobatch/kernels/cuda/elementwise_plan.h"
#include "autobatch/kernels/elementwise_device.h"
#include "cuda_on_cpu.h"
#include "launch.h"

#include <ATen/ops/empty.h>

namespace autobatch::on_device {
using namespace cuda;
}
#define cuda on_device
#include "autobatch/kernels/cuda/elementwise.cu"
#undef cuda

namespace simulated {
namespace {

using autobatch::ElementwiseProgram;
using autobatch::cuda::KernelPlace;
using autobatch::cuda::KernelStep;

bool has_kernel(c10::Device, c10::ScalarType dtype) {
  return autobatch::cuda::element_of(dtype).has_value();
}

// Runs the program's steps with host addresses in place of device addresses.
void run(const ElementwiseProgram& program, c10::Device device) {
  autobatch::cuda::ElementwisePlan plan = autobatch::cuda::plan_elementwise(program);
  at::Tensor scratch;
  Launch launch("autobatch::elementwise", device);
  const auto element = static_cast<int64_t>(c10::elementSize(program.dtype));
  const auto translate = [&](KernelPlace& place, const KernelStep& step, bool writes) {
    if (place.temporary) return;
    const int64_t last = (program.rows - 1) * place.row + (step.mid - 1) * place.mid + step.inner;
    const auto* address = reinterpret_cast<const void*>(place.address);
    char* there = launch.memory(address, static_cast<size_t>(last * element), writes);
    place.address = reinterpret_cast<uint64_t>(there);
  };
  for (KernelStep& step : plan.steps) {
    translate(step.a, step, false);
    if (is_binary(step.code)) translate(step.b, step, false);
    translate(step.out, step, true);
  }
  if (plan.scratch_bytes > 0) {
    scratch = at::empty({plan.scratch_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    plan.task.scratch = launch.memory(scratch.const_data_ptr(), scratch.nbytes(), true);
  }
  const auto steps = static_cast<int64_t>(plan.steps.size());
  TORCH_CHECK(
      autobatch::on_device::launch_elementwise(plan.task, plan.steps.data(), steps, nullptr) == 0);
}

}  // namespace

void register_elementwise_kernel() {
  autobatch::register_elementwise_kernel(kType, {has_kernel, run});
}

void forget_elementwise_kernel() { autobatch::register_elementwise_kernel(kType, {}); }

}  // namespace simulated

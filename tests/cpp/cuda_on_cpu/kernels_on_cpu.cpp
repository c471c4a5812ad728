// kernels.cu itself, in a namespace for each variant in place of autobatch::cuda.
#include "kernels_on_cpu.h"

namespace autobatch {
namespace sm90 {
using namespace cuda;
}
namespace sm70 {
using namespace cuda;
}
namespace elementwise_on_cpu {
using namespace cuda;
}
}  // namespace autobatch

#define __CUDA_ARCH__ 900
#define cuda sm90
#include "autobatch/kernels/cuda/kernels.cu"
#undef cuda
#undef __CUDA_ARCH__

#define __CUDA_ARCH__ 700
#define cuda sm70
#include "autobatch/kernels/cuda/kernels.cu"
#undef cuda

#define cuda elementwise_on_cpu
#include "autobatch/kernels/cuda/elementwise.cu"
#undef cuda

// Copies of kernels.cu with a fault each, made by CMakeLists.txt.
#include "planted_faults.inc"

namespace autobatch {

int run_elementwise_on_cpu(const cuda::ElementwiseTask& task, const cuda::ElementwiseStep* steps,
                           int64_t num_steps) {
  return elementwise_on_cpu::run_elementwise(task, steps, num_steps, nullptr);
}

#define KERNELS(name) \
  {#name, name::gather, name::unpack, name::scatter_add, name::scatter_add_in_order}

const std::vector<KernelsOnCpu> kKernelsOnCpu = {KERNELS(sm90), KERNELS(sm70)};
const std::vector<KernelsOnCpu> kPlantedFaults = {PLANTED_FAULTS(KERNELS)};

}  // namespace autobatch

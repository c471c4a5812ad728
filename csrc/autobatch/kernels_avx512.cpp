#include "autobatch/cpu_kernels.h"
#include "autobatch/pointwise_kernel.h"
#include "autobatch/vector_products_kernel.h"

namespace autobatch {
namespace {

void turn(const float* from, int64_t step, int64_t n, int64_t m, float* to, int64_t to_step) {
  at::vec::transpose_mxn<float>(from, step, to, to_step, static_cast<int>(n), static_cast<int>(m));
}

}  // namespace

const CpuKernels kernels_avx512 = {run_rows, run_vector_kernel, turn};

}  // namespace autobatch

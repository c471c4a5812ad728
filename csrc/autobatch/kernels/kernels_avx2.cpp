#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/elementwise_kernel.h"
#include "autobatch/kernels/gemv_kernel.h"
#include "autobatch/kernels/small_gemm_kernel.h"
#include "autobatch/kernels/transpose_kernel.h"

namespace autobatch {

const CpuKernels kernels_avx2 = {run_rows, run_vector_kernel, turn, multiply_block};

}  // namespace autobatch

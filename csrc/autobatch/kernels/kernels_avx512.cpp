#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/elementwise_kernel.h"
#include "autobatch/kernels/gemv_kernel.h"
#include "autobatch/kernels/transpose_kernel.h"

namespace autobatch {

const CpuKernels kernels_avx512 = {run_rows, run_vector_kernel, turn, nullptr};

}  // namespace autobatch

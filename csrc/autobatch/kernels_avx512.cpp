#include "autobatch/cpu_kernels.h"
#include "autobatch/pointwise_kernel.h"
#include "autobatch/turn_kernel.h"
#include "autobatch/vector_products_kernel.h"

namespace autobatch {

const CpuKernels kernels_avx512 = {run_rows, run_vector_kernel, turn, nullptr};

}  // namespace autobatch

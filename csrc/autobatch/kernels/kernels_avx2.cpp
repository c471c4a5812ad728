#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/elementwise_kernel.h"
#include "autobatch/kernels/matrix_products_kernel.h"
#include "autobatch/kernels/small_gemm_kernel.h"
#include "autobatch/kernels/softmax_kernel.h"
#include "autobatch/kernels/transpose_kernel.h"

namespace autobatch {

const CpuKernels kernels_avx2 = {run_rows,
                                 run_product_kernel,
                                 run_softmax,
                                 turn,
                                 multiply_block,
                                 add_sparse_product<float>,
                                 add_sparse_product<double>};

}  // namespace autobatch

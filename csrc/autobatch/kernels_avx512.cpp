#include "autobatch/pointwise_kernel.h"
#include "autobatch/vector_products_kernel.h"

namespace autobatch {

void pointwise_kernel_avx512(const PointwiseProgram& program, int64_t first, int64_t last,
                             int64_t block, void* scratch) {
  run_rows(program, first, last, block, scratch);
}

void vector_kernel_avx512(c10::ArrayRef<VectorProduct> products, c10::ScalarType dtype) {
  run_vector_kernel(products, dtype);
}

}  // namespace autobatch

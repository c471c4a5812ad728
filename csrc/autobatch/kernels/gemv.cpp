// Divides products with vectors among threads.
#include "autobatch/kernels/gemv.h"

#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace autobatch {
namespace {

int64_t elements(const VectorProduct& product) {
  return product.out.rows * product.out.columns * product.left.columns;
}

}  // namespace

void run_vector_products(c10::ArrayRef<VectorProduct> products, c10::ScalarType dtype, bool apart) {
  if (!apart || products.empty()) return cpu_kernels()->vector_products(products, dtype);
  const int64_t grain =
      std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements(products.front())));
  at::parallel_for(
      0, static_cast<int64_t>(products.size()), grain, [&](int64_t first, int64_t last) {
        cpu_kernels()->vector_products(
            products.slice(static_cast<size_t>(first), static_cast<size_t>(last - first)), dtype);
      });
}

}  // namespace autobatch

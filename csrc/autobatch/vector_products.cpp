// Products with vectors: which kernel, and threads.
#include "autobatch/vector_products.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <string>

namespace autobatch {
namespace {

// As ATen's own grain: below that a second thread costs more than it saves.
constexpr int64_t kGrainElements = 32768;

// Null if there is none for this CPU.
VectorKernel find_kernel() {
#if defined(__x86_64__)
  const std::string capability = at::get_cpu_capability();  // ATEN_CPU_CAPABILITY is heeded
  if (capability == "AVX512") return vector_kernel_avx512;
  if (capability == "AVX2") return vector_kernel_avx2;
#endif
  return nullptr;
}

VectorKernel the_kernel() {
  static const VectorKernel kernel = find_kernel();
  return kernel;
}

int64_t elements(const VectorProduct& product) {
  return product.out.rows * product.out.columns * product.left.columns;
}

}  // namespace

bool can_run_vector_products(c10::ScalarType dtype) {
  const bool has_type = dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  return has_type && the_kernel() != nullptr;
}

void run_vector_products(c10::ArrayRef<VectorProduct> products, c10::ScalarType dtype, bool apart) {
  if (!apart || products.empty()) return the_kernel()(products, dtype);
  const int64_t grain =
      std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements(products.front())));
  at::parallel_for(
      0, static_cast<int64_t>(products.size()), grain, [&](int64_t first, int64_t last) {
        the_kernel()(products.slice(static_cast<size_t>(first), static_cast<size_t>(last - first)),
                     dtype);
      });
}

}  // namespace autobatch

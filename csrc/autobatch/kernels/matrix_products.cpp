// Distributes products of the members' own matrices among threads. For each product, chooses the
// kernel of this library or at::mm.
#include "autobatch/kernels/matrix_products.h"

#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace autobatch {
namespace {

// kLarge: a product with at least this many multiply-adds is faster in a BLAS, including the cost
// of the call. kMostTerms: the largest number of terms of a sum that the kernel adds one after the
// other.
constexpr int64_t kLarge = int64_t{1} << 18;
constexpr int64_t kMostTerms = 1024;

int64_t multiply_adds(const MatrixProduct& product) {
  return product.out.rows * product.out.columns * product.left.columns;
}

bool is_for_kernel(const MatrixProduct& product) {
  const MatrixPlace& out = product.out;
  if (out.rows == 1 || out.columns == 1 || product.left.columns == 1) return true;
  if (out.row == 0 || out.column == 0) return true;  // at::mm rejects a stride of 0
  return product.left.columns <= kMostTerms && multiply_adds(product) < kLarge;
}

void run_in_order(c10::ArrayRef<MatrixProduct> products, c10::ScalarType dtype) {
  while (!products.empty()) {
    const auto* large = std::find_if_not(products.begin(), products.end(), is_for_kernel);
    const auto small = static_cast<size_t>(large - products.begin());
    if (small > 0) cpu_kernels()->matrix_products(products.slice(0, small), dtype);
    if (small == products.size()) return;
    multiply_by_library(*large, dtype);
    products = products.slice(small + 1);
  }
}

}  // namespace

void multiply_by_library(const MatrixProduct& product, c10::ScalarType dtype) {
  const auto view = [&](const MatrixPlace& place) {
    return at::from_blob(place.data, {place.rows, place.columns}, {place.row, place.column}, dtype);
  };
  at::Tensor out = view(product.out);
  product.adds ? out.addmm_(view(product.left), view(product.right))
               : at::mm_out(out, view(product.left), view(product.right));
}

void run_matrix_products(c10::ArrayRef<MatrixProduct> products, c10::ScalarType dtype,
                         bool disjoint) {
  if (!disjoint || products.empty()) return run_in_order(products, dtype);
  const int64_t grain =
      std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, multiply_adds(products.front())));
  at::parallel_for(
      0, static_cast<int64_t>(products.size()), grain, [&](int64_t first, int64_t last) {
        run_in_order(products.slice(static_cast<size_t>(first), static_cast<size_t>(last - first)),
                     dtype);
      });
}

}  // namespace autobatch

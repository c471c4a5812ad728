// Compares products of members' matrices, and softmax over segments, with ATen.
#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/matrix_products.h"
#include "autobatch/kernels/segment_softmax.h"

#include <ATen/ATen.h>

#include "catch.h"

namespace autobatch {
namespace {

using at::Tensor;

MatrixPlace place_of(const Tensor& t) {
  return {t.mutable_data_ptr(), t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

// A matrix in one of four layouts: by row, by row with gaps, by column, and with neither stride 1.
Tensor matrix(int64_t rows, int64_t columns, int layout, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  switch (layout) {
    case 0:
      return at::randn({rows, columns}, options);
    case 1:
      return at::randn({rows, columns + 3}, options).narrow(1, 1, columns);
    case 2:
      return at::randn({columns, rows}, options).t();
    default:
      return at::randn({rows, columns, 2}, options).select(2, 1);
  }
}

void check_close(const Tensor& found, const Tensor& expected) {
  const double tolerance = found.scalar_type() == at::kFloat ? 1e-4 : 1e-11;
  CHECK(at::allclose(found, expected, tolerance, tolerance, /*equal_nan=*/true));
}

}  // namespace

TEST_CASE("matrix products: sizes, layouts and dtypes", "[kernels]") {
  const int64_t sizes[][3] = {{1, 1, 1},   {1, 7, 5},    {5, 7, 1},    {4, 1, 6},    {2, 3, 2},
                              {5, 9, 33},  {33, 9, 5},   {20, 32, 20}, {16, 16, 64}, {7, 40, 130},
                              {70, 20, 3}, {3, 1100, 4}, {90, 80, 70}};
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    if (!has_cpu_kernels(dtype)) continue;
    for (const auto& [m, k, n] : sizes) {
      for (int layouts = 0; layouts < 64; ++layouts) {
        const Tensor out = matrix(m, n, layouts % 4, dtype);
        const Tensor left = matrix(m, k, layouts / 4 % 4, dtype);
        const Tensor right = matrix(k, n, layouts / 16, dtype);
        CAPTURE(m, k, n, layouts, dtype);
        const Tensor sum = out + left.matmul(right);
        MatrixProduct product{place_of(out), place_of(left), place_of(right), true};
        run_matrix_products(product, dtype, true);
        check_close(out, sum);
        product.adds = false;
        run_matrix_products(product, dtype, true);
        check_close(out, left.matmul(right));
      }
    }
  }
}

TEST_CASE("matrix products: several add to one output, which may be broadcast", "[kernels]") {
  if (!has_cpu_kernels(at::kFloat)) return;
  const Tensor left = at::randn({3, 20, 8}), right = at::randn({3, 8, 24});
  const Tensor each = at::bmm(left, right);
  for (const int64_t stride : {24, 0}) {  // 0: all rows are one row in memory
    const Tensor out = at::zeros({20, 24});
    std::vector<MatrixProduct> products;
    for (int64_t i = 0; i < 3; ++i) {
      MatrixPlace to = place_of(out);
      to.row = stride;
      products.push_back({to, place_of(left[i]), place_of(right[i]), true});
    }
    run_matrix_products(products, at::kFloat, false);
    stride == 0 ? check_close(out[0], each.sum(0).sum(0)) : check_close(out, each.sum(0));
  }
}

TEST_CASE("matrix products: large and small products in their order", "[kernels]") {
  if (!has_cpu_kernels(at::kFloat)) return;
  const Tensor large = at::randn({128, 128}), small = at::randn({128, 4});
  const Tensor square = at::zeros({128, 128}), out = at::zeros({128, 4});
  const std::vector<MatrixProduct> products = {
      {place_of(square), place_of(large), place_of(large), false},
      {place_of(out), place_of(square), place_of(small), false},
      {place_of(square), place_of(large), place_of(large), true}};
  run_matrix_products(products, at::kFloat, false);
  check_close(out, large.mm(large).mm(small));
  check_close(square, 2 * large.mm(large));
}

TEST_CASE("segment softmax: values and gradients", "[kernels]") {
  const Counts counts = {1, 0, 5, 16, 17, 40, 2};
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Tensor x = at::randn({81}, dtype) * 3, g = at::randn({81}, dtype);
    if (!has_softmax_kernel(x)) continue;
    x[0] = -std::numeric_limits<double>::infinity();  // alone in its segment: NaN, as in eager
    x[3] = -std::numeric_limits<double>::infinity();
    x[8] = std::numeric_limits<double>::quiet_NaN();
    for (const bool log : {false, true}) {
      Tensor out = at::empty_like(x);
      segment_softmax(x, counts, log, out);
      const Tensor gradient = segment_softmax_gradient(g, out, counts, log);
      int64_t start = 0;
      for (const int64_t n : counts) {
        const auto part = [&](const Tensor& t) { return t.narrow(0, start, n); };
        const Tensor expected = log ? part(x).log_softmax(0) : part(x).softmax(0);
        check_close(part(out), expected);
        check_close(part(gradient),
                    log ? at::_log_softmax_backward_data(part(g), expected, 0, dtype)
                        : at::_softmax_backward_data(part(g), expected, 0, dtype));
        start += n;
      }
    }
  }
}

}  // namespace autobatch

#include "autobatch/kernels/small_gemm.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/common/prefetch.h"
#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/packed_weights.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <set>

namespace autobatch {
namespace {

using at::Tensor;

// Maximum number of rows in a call of oneDNN's kernel. oneDNN compiles a kernel for each number of
// rows. Calls with more rows are not faster.
constexpr int64_t kRows = 16;
// Maximum number of rows in a call of oneDNN's kernel in which rows of a weight replace the rows of
// x. Only a few different numbers of rows occur in these calls.
constexpr int64_t kTurnedRows = 64;
// The kernel adds the terms of a sum one after the other. A sum of more than kDepth terms is
// computed in parts, as in a BLAS.
constexpr int64_t kDepth = 1024;
// Size of the part of the matrix that stays in the cache while all rows of x are multiplied, in
// bytes.
constexpr int64_t kPanelBytes = int64_t{1} << 18;
// Maximum number of shapes for which oneDNN compiles kernels. A shape has up to 64 kernels of 19
// KB, but usually only a few.
constexpr size_t kMostShapes = 512;
// kGrain: number of multiply-adds that justify a thread. kPart: number of columns (or rows) in a
// thread's part.
constexpr int64_t kGrain = int64_t{1} << 20;
constexpr int64_t kPart = 48;
// With this many rows of x, a row-major copy of the matrix saves as much time as it costs.
constexpr int64_t kRowsForCopy = 128;
constexpr size_t kMostCopied = size_t{1} << 22;  // bytes
// Number of rows of the two factors of a weight's gradient that are multiplied in one step.
constexpr int64_t kFactorRows = 64;

// The largest sizes for which a kernel is faster than a BLAS, as measured (docs/benchmarks.md,
// "Rows times a weight").
struct Limits {
  int64_t rows;         // rows of x
  int64_t turned_rows;  // rows of x, if the matrix is column-major and is used once
  int64_t factor_rows;  // rows of both factors of a weight's gradient
  int64_t each_rows;    // rows of x, if one call computes many products
  int64_t lanes;        // number of floats in a SIMD vector
};
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr Limits kLibrary{kAny, 64, 256, kAny, 16};
constexpr Limits kOwn{32, 32, 64, 64, 8};

bool is_own() { return cpu_kernels()->multiply != nullptr; }
const Limits& limits() { return is_own() ? kOwn : kLibrary; }

// Whether a kernel may be used. If the user allows lower precision in oneDNN's products, returns
// false, because at::mm supports this setting and the kernels do not.
bool has_kernel() {
  if (cpu_kernels() == nullptr) return false;
  if (is_own()) return true;
  if (!at::globalContext().userEnabledMkldnn()) return false;
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::NONE || precision == at::Float32Precision::IEEE;
}

// Whether the rows are stored one after the other and each row is dense.
bool is_by_row(const Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }

// Whether a kernel may be used for a shape. oneDNN compiles kernels for each new shape and never
// frees them, so only the first kMostShapes shapes are admitted. The answer for a shape is the same
// in each call and on any thread, so that results have the same bits in each run. `shape`:
// everything that determines a compiled kernel, except the number of rows.
using Shape = std::array<int64_t, 5>;
bool is_admitted(const Shape& shape) {
  if (is_own()) return true;
  static auto* mutex = new std::mutex();  // never freed, because threads may outlive static objects
  static auto* admitted = new std::set<Shape>();
  const std::lock_guard lock(*mutex);
  if (admitted->size() < kMostShapes) admitted->insert(shape);
  return admitted->contains(shape);
}

bool is_for_kernel(const Tensor& t) {
  return has_host_memory(t.device()) && t.scalar_type() == at::kFloat && is_by_row(t);
}

bool suits(const Tensor& out, const Tensor& x, const Tensor& matrix) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1);
  // For a small number of columns, the kernel would use only a part of each vector.
  return n > 0 && k >= 8 && m >= 16 && is_for_kernel(x) && is_for_kernel(matrix) &&
         is_for_kernel(out) && has_kernel() && n <= limits().rows &&
         is_admitted({k, m, x.stride(0), matrix.stride(0), out.stride(0)});
}

// Returns MultiplyBlock::depth_step, the number of terms that are summed before their sum is added
// to the result. For a wide matrix this number is small, so that the part of the matrix that all
// rows need stays in the nearest cache. `rows` and `columns` are the sizes of the whole product, so
// that the result has the same bits for any number of threads.
int64_t depth_step(int64_t rows, int64_t columns) {
  if (!is_own()) return kDepth;
  return rows <= kOwn.rows && columns > 2 * kPart ? 32 : 256;
}

MultiplyBlock block_of(const float* x, int64_t x_step, const float* matrix, int64_t matrix_step,
                       float* out, int64_t out_step, int64_t rows, int64_t depth, int64_t columns,
                       bool adds) {
  return {x,
          matrix,
          out,
          rows,
          depth,
          columns,
          x_step,
          matrix_step,
          out_step,
          adds,
          depth_step(rows, columns)};
}

// Runs the product on this thread. `rows`: maximum number of rows in one call of oneDNN's kernel.
void run(const MultiplyBlock& block, int64_t rows = kRows) {
  if (is_own()) return cpu_kernels()->multiply(block);
  const auto [x, matrix, out, n, depth, m, ldx, ldm, ldo, adds, step] = block;
  const int64_t fitting = kPanelBytes / static_cast<int64_t>(sizeof(float)) / depth / 64 * 64;
  const int64_t width = n <= rows ? m : std::min(m, std::max<int64_t>(64, fitting));
  for (int64_t j = 0; j < m; j += width) {
    for (int64_t i = 0; i < n; i += rows) {
      for (int64_t k = 0; k < depth; k += step) {
        at::native::cpublas::brgemm(std::min(rows, n - i), std::min(width, m - j),
                                    std::min(step, depth - k), ldx, ldm, ldo, adds || k > 0,
                                    x + i * ldx + k, matrix + k * ldm + j, out + i * ldo + j,
                                    /*is_vnni=*/false);
      }
    }
  }
}

// Returns the part of the product with the rows [first, last), or with the columns [first, last).
MultiplyBlock part_of(const MultiplyBlock& whole, bool by_rows, int64_t first, int64_t last) {
  MultiplyBlock part = whole;
  if (by_rows) {
    part.x += first * whole.x_step, part.out += first * whole.out_step;
    part.rows = std::min(last, whole.rows) - first;
  } else {
    part.matrix += first, part.out += first;
    part.columns = std::min(last, whole.columns) - first;
  }
  return part;
}

void run_kernel(Tensor& out, const Tensor& x, const Tensor& matrix, bool adds) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1);
  const MultiplyBlock whole =
      block_of(x.const_data_ptr<float>(), x.stride(0), matrix.const_data_ptr<float>(),
               matrix.stride(0), out.mutable_data_ptr<float>(), out.stride(0), n, k, m, adds);
  // With oneDNN's kernel the product is divided by rows, because all rows use the same panels of
  // the matrix.
  const bool by_rows = !is_own() || n >= m;
  const int64_t side = by_rows ? n : m, piece = is_own() ? kPart : kRows;
  const int64_t grain =
      std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n * m / side * piece * k));
  at::parallel_for(0, (side + piece - 1) / piece, grain, [&](int64_t begin, int64_t end) {
    run(part_of(whole, by_rows, begin * piece, end * piece));
  });
}

void fill_rows(Tensor& out, const Tensor& bias) {
  const Tensor row = bias.contiguous();
  const auto* from = row.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < out.size(0); ++i) {
    std::copy_n(from, out.size(1), to + i * out.stride(0));
  }
}

// Returns a transposed copy [m, n] of a row-major tensor [n, m].
Tensor turned(const Tensor& rows) {
  const int64_t n = rows.size(0), m = rows.size(1);
  Tensor out = pooled_empty({m, n}, rows.options());
  cpu_kernels()->turn(rows.const_data_ptr<float>(), rows.stride(0), n, m,
                      out.mutable_data_ptr<float>(), n);
  return out;
}

// Computes out = left^T right, or out += left^T right if `adds` is true. The sizes are [M, K] = [n,
// M]^T [n, K].
void run_transposed(Tensor& out, const Tensor& left, const Tensor& right, bool adds) {
  for (int64_t i = 0; i < left.size(0); i += kFactorRows, adds = true) {
    const int64_t n = std::min(kFactorRows, left.size(0) - i);
    run_kernel(out, turned(left.narrow(0, i, n)), right.narrow(0, i, n), adds);
  }
}

// The next functions multiply a few rows x by a column-major matrix that is used once. They compute
// the product in transposed form: the columns of the matrix replace the rows of x, and x and the
// result are transposed. The number of rows of x is rounded up to whole vectors (padded()).
int64_t padded(int64_t rows) {
  const int64_t lanes = limits().lanes;
  return (rows + lanes - 1) / lanes * lanes;
}

bool suits_turned(const Tensor& out, const Tensor& x, const Tensor& matrix) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1);
  return n >= 4 && k >= 64 && m >= 64 && matrix.stride(0) == 1 && matrix.stride(1) >= k &&
         is_for_kernel(x) && is_for_kernel(out) && has_host_memory(matrix.device()) &&
         matrix.scalar_type() == at::kFloat && has_kernel() && n <= limits().turned_rows &&
         n * 5 >= padded(n) * 3 && is_admitted({m, k, matrix.stride(1)});
}

void run_turned(Tensor& out, const Tensor& x, const Tensor& matrix, const Tensor& bias) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1), width = padded(n);
  const Tensor rows = pooled_empty({k, width}, x.options());
  const Tensor result = pooled_empty({m, width}, x.options());
  auto* to = result.mutable_data_ptr<float>();
  auto* from = rows.mutable_data_ptr<float>();
  if (n < width) {  // pads with zeros, because arbitrary numbers may make products slow
    for (int64_t i = 0; i < k; ++i) std::fill_n(from + i * width + n, width - n, 0.0F);
  }
  cpu_kernels()->turn(x.const_data_ptr<float>(), x.stride(0), n, k, from, width);
  if (bias.defined()) {
    const Tensor column = bias.contiguous();
    const auto* b = column.const_data_ptr<float>();
    for (int64_t j = 0; j < m; ++j) std::fill_n(to + j * width, width, b[j]);
  }
  const auto* weights = matrix.const_data_ptr<float>();
  run(block_of(weights, matrix.stride(1), from, width, to, width, m, k, width, bias.defined()),
      kTurnedRows);
  cpu_kernels()->turn(to, width, m, n, out.mutable_data_ptr<float>(), out.stride(0));
}

// Returns a row-major copy of the matrix if `copies` has one, and otherwise the matrix itself.
Tensor found_by_row(const Tensor& matrix, int64_t rows, WeightCopies* copies) {
  if (copies == nullptr || is_by_row(matrix) || !has_host_memory(matrix.device()) ||
      matrix.scalar_type() != at::kFloat || !has_kernel() || rows > limits().rows) {
    return matrix;
  }
  Tensor copy = copies->by_row(matrix, rows);
  return copy.defined() ? copy : matrix;
}

}  // namespace

Tensor WeightCopies::by_row(const Tensor& matrix, int64_t rows) {
  if (matrix.stride(0) != 1 || matrix.nbytes() > kMostCopied) return {};
  Turned& known = turned_[matrix.const_data_ptr()];
  if (!known.matrix.defined() || !known.matrix.sizes().equals(matrix.sizes()) ||
      !known.matrix.strides().equals(matrix.strides())) {
    known = {matrix, {}, 0};
  }
  const bool again = known.rows > 0;
  known.rows += rows;
  if (!known.copy.defined() && again && known.rows >= kRowsForCopy) {
    known.copy = turned(matrix.t());
    bytes_ += known.copy.nbytes();
  }
  return known.copy;
}

void multiply_into(Tensor& out, const Tensor& x, const Tensor& matrix, WeightCopies* copies,
                   const Tensor& bias) {
  const Tensor found = found_by_row(matrix, x.size(0), copies);
  if (suits(out, x, found)) {
    if (bias.defined()) fill_rows(out, bias);
    run_kernel(out, x, found, bias.defined());
  } else if (suits_turned(out, x, matrix)) {
    run_turned(out, x, matrix, bias);
  } else {
    bias.defined() ? at::addmm_out(out, bias, x, matrix) : at::mm_out(out, x, matrix);
  }
}

Tensor multiply(const Tensor& x, const Tensor& matrix, WeightCopies* copies, const Tensor& bias) {
  const int64_t n = x.size(0), m = matrix.size(1);
  Tensor out = pooled_empty({n, m}, x.options());
  multiply_into(out, x, matrix, copies, bias);
  return out;
}

void add_multiplied(Tensor& out, const Tensor& x, const Tensor& matrix, WeightCopies* copies) {
  const Tensor found = found_by_row(matrix, x.size(0), copies);
  suits(out, x, found) ? run_kernel(out, x, found, true) : void(out.addmm_(x, matrix));
}

namespace {

bool is_shared(const Tensor& x) { return x.size(0) == 1 || x.stride(0) == 0; }

// Whether the kernel supports each of the n matrices of the tensor `all`.
bool are_for_kernel(const Tensor& all) { return is_for_kernel(all.select(0, 0)); }

bool suits_each(const Tensor& x, const Tensor& y, const Tensor& out) {
  const int64_t m = x.size(1), k = x.size(2), columns = y.size(2);
  if (!has_host_memory(x.device()) || x.scalar_type() != at::kFloat || !is_shared(x) ||
      !has_kernel())
    return false;
  const bool by_row = x.stride(2) == 1 && x.stride(1) >= k;
  const bool by_column = x.stride(1) == 1 && x.stride(2) >= m;
  return (by_row || by_column) && m >= 8 && m <= limits().each_rows && k >= 8 && columns >= 16 &&
         are_for_kernel(y) && are_for_kernel(out) &&
         is_admitted({k, columns, x.stride(1), y.stride(1), out.stride(1)});
}

}  // namespace

void multiply_each(Tensor& out, const Tensor& x, const Tensor& y) {
  if (!suits_each(x, y, out)) return void(at::bmm_out(out, x, y));
  const int64_t n = y.size(0), m = x.size(1), k = x.size(2), columns = y.size(2);
  Tensor matrix = x.select(0, 0);
  if (!is_by_row(matrix)) matrix = turned(matrix.t());
  const auto* left = matrix.const_data_ptr<float>();
  const auto* right = y.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kGrain / (m * k * columns));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run(block_of(left, matrix.stride(0), right + i * y.stride(0), y.stride(1),
                   to + i * out.stride(0), out.stride(1), m, k, columns, false));
    }
  });
}

Tensor sum_of_each(const Tensor& x, const Tensor& y) {
  const int64_t n = x.size(0), m = x.size(1), columns = x.size(2), k = y.size(1);
  const bool suits = has_host_memory(x.device()) && x.scalar_type() == at::kFloat && has_kernel() &&
                     m >= 8 && m <= limits().each_rows && columns >= 8 && k >= 16 &&
                     are_for_kernel(x) && y.stride(2) == 1 && y.stride(1) >= columns &&
                     is_admitted({columns, k, x.stride(1)});
  if (!suits) return at::bmm(x, y.mT()).sum(0);
  Tensor sum = pooled_empty({m, k}, x.options());
  const Tensor scratch = pooled_empty({columns, k}, x.options());
  auto* right = scratch.mutable_data_ptr<float>();
  for (int64_t i = 0; i < n; ++i) {
    cpu_kernels()->turn(y.const_data_ptr<float>() + i * y.stride(0), y.stride(1), k, columns, right,
                        k);
    run(block_of(x.const_data_ptr<float>() + i * x.stride(0), x.stride(1), right, k,
                 sum.mutable_data_ptr<float>(), k, m, columns, k, i > 0));
  }
  return sum;
}

bool suits_small_products(int64_t m, int64_t k, int64_t n) {
  return has_kernel() && m >= 8 && m <= limits().each_rows && k >= 8 && k <= limits().each_rows &&
         n >= 16;
}

namespace {

// Runs small products by a kernel or by ATen. The object stores the choice for the previous shape,
// because consecutive products often have the same shape.
class SmallProductRun {
 public:
  void run(MultiplyBlock block) {
    const Shape shape{block.depth, block.columns, block.x_step, block.matrix_step, block.out_step};
    if (shape != shape_) shape_ = shape, is_admitted_ = has_kernel_ && is_admitted(shape);
    if (!is_admitted_) return run_by_library(block);
    block.depth_step = depth_step(block.rows, block.columns);
    autobatch::run(block, kTurnedRows);
  }

 private:
  static void run_by_library(const MultiplyBlock& block) {
    const auto place = [](const float* data, int64_t rows, int64_t columns, int64_t step) {
      return MatrixPlace{const_cast<float*>(data), rows, columns, step, 1};
    };
    multiply_by_library(
        {place(block.out, block.rows, block.columns, block.out_step),
         place(block.x, block.rows, block.depth, block.x_step),
         place(block.matrix, block.depth, block.columns, block.matrix_step), block.adds},
        at::kFloat);
  }

  bool has_kernel_ = has_kernel(), is_admitted_ = false;
  Shape shape_{};
};

// Prefetches the operands of a product. The operands are usually not in the nearest caches, and the
// hardware cannot predict their addresses.
void prefetch_operands(const MultiplyBlock& block) {
  const auto bytes = [](int64_t rows, int64_t step) {
    return static_cast<size_t>(rows * step) * sizeof(float);
  };
  prefetch_row(block.x, bytes(block.rows, block.x_step));
  prefetch_row(block.matrix, bytes(block.depth, block.matrix_step));
  prefetch_row(block.out, bytes(block.rows, block.out_step));
}

}  // namespace

void run_small_products(c10::ArrayRef<MultiplyBlock> products, bool disjoint) {
  const auto count = static_cast<int64_t>(products.size());
  const auto nth = [&](int64_t i) -> const MultiplyBlock& {
    return products[static_cast<size_t>(i)];
  };
  const auto run = [&](int64_t begin, int64_t end) {
    SmallProductRun each;
    for (int64_t i = begin; i < end; ++i) {
      if (i + 1 < end) prefetch_operands(nth(i + 1));
      each.run(nth(i));
    }
  };
  if (!disjoint || count == 0) return run(0, count);
  // A product with `adds` runs on the same thread as the product whose output it adds to.
  const auto next_apart = [&](int64_t i) {
    while (i < count && nth(i).adds) ++i;
    return i;
  };
  const int64_t grain =
      std::max<int64_t>(1, kGrain / (nth(0).rows * nth(0).depth * nth(0).columns));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    run(begin == 0 ? 0 : next_apart(begin), next_apart(end));
  });
}

namespace {

// Whether a kernel is suitable for left^T right. `step`: floats from one row of the result to the
// next.
bool suits_transposed(const Tensor& left, const Tensor& right, int64_t step) {
  const int64_t n = left.size(0), m = left.size(1), k = right.size(1);
  return n >= 4 && m >= 16 && k >= 64 && is_for_kernel(left) && is_for_kernel(right) &&
         has_kernel() && n <= limits().factor_rows && is_admitted({m, k, right.stride(0), step});
}

}  // namespace

Tensor multiply_transposed(const Tensor& left, const Tensor& right) {
  Tensor out = pooled_empty({left.size(1), right.size(1)}, left.options());
  if (!suits_transposed(left, right, right.size(1))) return at::mm_out(out, left.t(), right);
  run_transposed(out, left, right, false);
  return out;
}

void add_transposed(Tensor& out, const Tensor& left, const Tensor& right) {
  if (is_for_kernel(out) && suits_transposed(left, right, out.stride(0))) {
    run_transposed(out, left, right, true);
  } else {
    out.addmm_(left.t(), right);
  }
}

}  // namespace autobatch

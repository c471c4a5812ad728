#include "autobatch/multiply.h"

#include "autobatch/cpu_kernels.h"
#include "autobatch/pool.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>

namespace autobatch {
namespace {

using at::Tensor;

// A kernel is compiled for each number of rows, so a call takes up to this many: with more it is
// not faster.
constexpr int64_t kRows = 16;
// The kernel sums one term after the other: of more, parts are summed first, as a BLAS does.
constexpr int64_t kDepth = 1024;
// Bytes of the matrix that stay in the cache while all rows pass.
constexpr int64_t kPanelBytes = int64_t{1} << 18;
// Multiplications and additions that are worth a thread.
constexpr int64_t kGrain = int64_t{1} << 20;
constexpr size_t kMostShapes = 512;  // mostly a few kernels each, of 19 KB; up to 64
// A copy costs what this many rows gain by it.
constexpr int64_t kRowsForCopy = 128;
// Of products for weights' gradients: rows that go together, and above which a BLAS is as fast.
constexpr int64_t kFactorRows = 64;
constexpr int64_t kFewRows = 256;
// Of a matrix that lies column by column: rows up to which turning them is worth while.
constexpr int64_t kFewColumns = 64;
constexpr int64_t kTurnedRows = 64;              // a call: a weight's sizes are few
constexpr int64_t kLanes = 16;                   // of a vector
constexpr size_t kMostCopied = size_t{1} << 22;  // bytes

// With AVX-512 it was measured; and who asks for less precision gets the library that has it.
bool has_kernel() {
  const CpuKernels* kernels = cpu_kernels();
  if (kernels == nullptr || kernels->turn == nullptr || !at::globalContext().userEnabledMkldnn())
    return false;
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::NONE || precision == at::Float32Precision::IEEE;
}

// Whether rows lie one after the other, each row dense.
bool is_by_row(const Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }

// Kernels are compiled for the shapes that come first and kept by the library for good, so there is
// a limit: what meets data of ever other sizes goes without. What a shape was told it is told again
// on any thread, so that results have the same bits each time.
// `shape`: all that a kernel is compiled for, but for the number of rows.
using Shape = std::array<int64_t, 5>;
bool is_admitted(const Shape& shape) {
  static auto* mutex = new std::mutex();  // threads may outlive static objects
  static auto* admitted = new std::set<Shape>();
  const std::lock_guard lock(*mutex);
  if (admitted->size() < kMostShapes) admitted->insert(shape);
  return admitted->contains(shape);
}

bool is_for_kernel(const Tensor& t) {
  return t.is_cpu() && t.scalar_type() == at::kFloat && is_by_row(t);
}

bool suits(const Tensor& out, const Tensor& x, const Tensor& matrix) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1);
  // Few columns leave vectors empty.
  return n > 0 && k >= 8 && m >= 16 && is_for_kernel(x) && is_for_kernel(matrix) &&
         is_for_kernel(out) && has_kernel() &&
         is_admitted({k, m, x.stride(0), matrix.stride(0), out.stride(0)});
}

// One [n, columns] part of the result.
struct Panel {
  const float *x, *matrix;
  float* out;
  int64_t k, columns, ldx, ldm, ldo;
  bool adds;

  void run(int64_t first, int64_t last, int64_t rows = kRows) const {
    for (int64_t i = first; i < last; i += rows) {
      for (int64_t j = 0; j < k; j += kDepth) {
        at::native::cpublas::brgemm(std::min(rows, last - i), columns, std::min(kDepth, k - j), ldx,
                                    ldm, ldo, adds || j > 0, x + i * ldx + j, matrix + j * ldm,
                                    out + i * ldo, /*is_vnni=*/false);
      }
    }
  }
};

void run_kernel(Tensor& out, const Tensor& x, const Tensor& matrix, bool adds) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1);
  const int64_t fitting = kPanelBytes / static_cast<int64_t>(sizeof(float)) / k / 64 * 64;
  const int64_t width = n <= kRows ? m : std::min(m, std::max<int64_t>(64, fitting));
  const auto* from = x.const_data_ptr<float>();
  const auto* weights = matrix.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  // Over rows, as all columns of a panel share them; each block of them goes to one thread.
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, kRows * k * m));
  at::parallel_for(0, (n + kRows - 1) / kRows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t j = 0; j < m; j += width) {
      const Panel panel{from,        weights + j,      to + j,        k,   std::min(width, m - j),
                        x.stride(0), matrix.stride(0), out.stride(0), adds};
      panel.run(begin * kRows, std::min(n, end * kRows));
    }
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

// A copy [m, n] of what lies row by row, [n, m].
Tensor turned(const Tensor& rows) {
  const int64_t n = rows.size(0), m = rows.size(1);
  Tensor out = pooled_empty({m, n}, rows.options());
  cpu_kernels()->turn(rows.const_data_ptr<float>(), rows.stride(0), n, m,
                      out.mutable_data_ptr<float>(), n);
  return out;
}

// out (+)= left^T right, [M, K] = [n, M]^T [n, K].
void run_transposed(Tensor& out, const Tensor& left, const Tensor& right, bool adds) {
  for (int64_t i = 0; i < left.size(0); i += kFactorRows, adds = true) {
    const int64_t n = std::min(kFactorRows, left.size(0) - i);
    run_kernel(out, turned(left.narrow(0, i, n)), right.narrow(0, i, n), adds);
  }
}

// What a matrix that lies column by column is multiplied with, if it comes once and rows are few:
// its columns take the place of the rows, x and the result are turned. Rows in units of a vector.
int64_t padded(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

bool suits_turned(const Tensor& out, const Tensor& x, const Tensor& matrix) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1);
  return n >= 4 && n <= kFewColumns && n * 5 >= padded(n) * 3 && k >= 64 && m >= 64 &&
         matrix.stride(0) == 1 && matrix.stride(1) >= k && is_for_kernel(x) && is_for_kernel(out) &&
         matrix.is_cpu() && matrix.scalar_type() == at::kFloat && has_kernel() &&
         is_admitted({m, k, matrix.stride(1)});
}

void run_turned(Tensor& out, const Tensor& x, const Tensor& matrix, const Tensor& bias) {
  const int64_t n = x.size(0), k = x.size(1), m = matrix.size(1), width = padded(n);
  const Tensor rows = pooled_empty({k, width}, x.options());
  const Tensor result = pooled_empty({m, width}, x.options());
  auto* to = result.mutable_data_ptr<float>();
  auto* from = rows.mutable_data_ptr<float>();
  if (n < width) {  // their products are not read, but what lies there might make them slow
    for (int64_t i = 0; i < k; ++i) std::fill_n(from + i * width + n, width - n, 0.0F);
  }
  cpu_kernels()->turn(x.const_data_ptr<float>(), x.stride(0), n, k, from, width);
  if (bias.defined()) {
    const Tensor column = bias.contiguous();
    const auto* b = column.const_data_ptr<float>();
    for (int64_t j = 0; j < m; ++j) std::fill_n(to + j * width, width, b[j]);
  }
  const auto* weights = matrix.const_data_ptr<float>();
  const Panel panel{weights, from, to, k, width, matrix.stride(1), width, width, bias.defined()};
  panel.run(0, m, kTurnedRows);
  cpu_kernels()->turn(to, width, m, n, out.mutable_data_ptr<float>(), out.stride(0));
}

// The matrix as the kernel takes it, if there is one.
Tensor found_by_row(const Tensor& matrix, int64_t rows, WeightCopies* copies) {
  if (copies == nullptr || is_by_row(matrix) || !matrix.is_cpu() ||
      matrix.scalar_type() != at::kFloat || !has_kernel()) {
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

// Whether each of [n, ...] is for the kernel.
bool are_for_kernel(const Tensor& all) { return is_for_kernel(all.select(0, 0)); }

bool suits_each(const Tensor& x, const Tensor& y, const Tensor& out) {
  const int64_t m = x.size(1), k = x.size(2), columns = y.size(2);
  if (!x.is_cpu() || x.scalar_type() != at::kFloat || !is_shared(x) || !has_kernel()) return false;
  const bool by_row = x.stride(2) == 1 && x.stride(1) >= k;
  const bool by_column = x.stride(1) == 1 && x.stride(2) >= m;
  return (by_row || by_column) && m >= 8 && k >= 8 && columns >= 16 && are_for_kernel(y) &&
         are_for_kernel(out) && is_admitted({k, columns, x.stride(1), y.stride(1), out.stride(1)});
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
      const Panel panel{left,
                        right + i * y.stride(0),
                        to + i * out.stride(0),
                        k,
                        columns,
                        matrix.stride(0),
                        y.stride(1),
                        out.stride(1),
                        false};
      panel.run(0, m);
    }
  });
}

Tensor sum_of_each(const Tensor& x, const Tensor& y) {
  const int64_t n = x.size(0), m = x.size(1), columns = x.size(2), k = y.size(1);
  const bool suits = x.is_cpu() && x.scalar_type() == at::kFloat && has_kernel() && m >= 8 &&
                     columns >= 8 && k >= 16 && are_for_kernel(x) && y.stride(2) == 1 &&
                     y.stride(1) >= columns && is_admitted({columns, k, x.stride(1)});
  if (!suits) return at::bmm(x, y.mT()).sum(0);
  Tensor sum = at::empty({m, k}, x.options());
  const Tensor scratch = pooled_empty({columns, k}, x.options());
  auto* right = scratch.mutable_data_ptr<float>();
  for (int64_t i = 0; i < n; ++i) {
    cpu_kernels()->turn(y.const_data_ptr<float>() + i * y.stride(0), y.stride(1), k, columns, right,
                        k);
    const Panel panel{x.const_data_ptr<float>() + i * x.stride(0),
                      right,
                      sum.mutable_data_ptr<float>(),
                      columns,
                      k,
                      x.stride(1),
                      k,
                      k,
                      i > 0};
    panel.run(0, m);
  }
  return sum;
}

namespace {

// `step`: between rows of the result.
bool suits_transposed(const Tensor& left, const Tensor& right, int64_t step) {
  const int64_t n = left.size(0), m = left.size(1), k = right.size(1);
  return n >= 4 && n <= kFewRows && m >= 16 && k >= 64 && is_for_kernel(left) &&
         is_for_kernel(right) && has_kernel() && is_admitted({m, k, right.stride(0), step});
}

}  // namespace

Tensor multiply_transposed(const Tensor& left, const Tensor& right) {
  if (!suits_transposed(left, right, right.size(1))) return at::mm(left.t(), right);
  Tensor out = at::empty({left.size(1), right.size(1)}, left.options());
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

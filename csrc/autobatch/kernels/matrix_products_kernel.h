// The kernel of matrix_products.h, for one CPU capability. Only kernels_avx2.cpp and
// kernels_avx512.cpp include this file. Each of these files is compiled for one capability, with
// ATen's macros for this capability.
#pragma once

#include "autobatch/common/prefetch.h"
#include "autobatch/kernels/matrix_products.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <vector>

namespace autobatch {
namespace {

template <class T>
class MatrixProductRun {
 public:
  using V = at::vec::Vectorized<T>;
  static constexpr int64_t kLanes = V::size();

  void run(const MatrixProduct& product) {
    const MatrixPlace &out = product.out, &left = product.left, &right = product.right;
    adds_ = product.adds;
    if (left.columns == 1) return outer(out, left, right);
    if (right.columns == 1) return multiply(out, left, right);
    if (left.rows == 1) return multiply(out.transposed(), right.transposed(), left.transposed());
    const bool is_tall = out.columns < kLanes && out.rows > out.columns;
    const bool by_column = out.column != 1 && out.row == 1;
    is_tall || by_column ? tiles(out.transposed(), right.transposed(), left.transposed())
                         : tiles(out, left, right);
  }

 private:
  static T* data(const MatrixPlace& place) { return static_cast<T*>(place.data); }

  // Returns the elements of a vector contiguously: either `from` itself, if possible, or a copy in
  // `copy`.
  static const T* contiguous(const T* from, int64_t step, int64_t size, std::vector<T>& copy) {
    if (step == 1 || size == 1) return from;
    copy.resize(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) copy[static_cast<size_t>(i)] = from[i * step];
    return copy.data();
  }

  // Divides n elements into SIMD vectors. Calls f(i, lanes) for each vector, which has the elements
  // [i, i + lanes).
  template <class F>
  static void for_each_vector(int64_t n, const F& f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, n - i);
  }

  static V load(const T* from, int64_t lanes) {
    return lanes == kLanes ? V::loadu(from) : V::loadu(from, lanes);
  }
  void put(T* to, const V& value, int64_t lanes) const {
    const V result = adds_ ? load(to, lanes) + value : value;
    result.store(to, static_cast<int>(lanes));
  }
  void put_one(T& to, T value) const { to = adds_ ? to + value : value; }

  // --- a matrix and a vector ---

  // Computes out = matrix vector, or out += matrix vector.
  void multiply(const MatrixPlace& out, const MatrixPlace& matrix, const MatrixPlace& vector) {
    const int64_t n = matrix.rows;
    const T* v = contiguous(data(vector), vector.row, vector.rows, vector_);
    if (matrix.column == 1) {
      for (int64_t i = 0; i < n; ++i) {
        put_one(data(out)[i * out.row], dot(data(matrix) + i * matrix.row, v, matrix.columns));
      }
      return;
    }
    if (matrix.row == 1 && out.row == 1) {
      return for_each_vector(n, [&](int64_t i, int64_t lanes) {
        put(data(out) + i, combination(data(matrix) + i, matrix.column, v, matrix.columns, lanes),
            lanes);
      });
    }
    for (int64_t i = 0; i < n; ++i) {
      const T* row = contiguous(data(matrix) + i * matrix.row, matrix.column, matrix.columns, row_);
      put_one(data(out)[i * out.row], dot(row, v, matrix.columns));
    }
  }

  static T dot(const T* a, const T* b, int64_t n) {
    V sum(0);
    for_each_vector(n, [&](int64_t i, int64_t lanes) {
      sum = at::vec::fmadd(load(a + i, lanes), load(b + i, lanes), sum);
    });
    return at::vec::vec_reduce_all<T>([](const V& x, const V& y) { return x + y; }, sum);
  }

  // Multiplies each of `n` columns by the corresponding element of the vector, and sums the
  // columns. Returns `lanes` elements of the sum.
  static V combination(const T* columns, int64_t step, const T* vector, int64_t n, int64_t lanes) {
    V even(0), odd(0);
    int64_t j = 0;
    for (; j + 2 <= n; j += 2) {
      even = at::vec::fmadd(load(columns + j * step, lanes), V(vector[j]), even);
      odd = at::vec::fmadd(load(columns + (j + 1) * step, lanes), V(vector[j + 1]), odd);
    }
    if (j < n) even = at::vec::fmadd(load(columns + j * step, lanes), V(vector[j]), even);
    return even + odd;
  }

  // --- two matrices ---

  static constexpr int64_t kTileRows = 4;
  static constexpr int64_t kTileVectors = 2;  // 4 * 2 sums at a time hide the latency of an add
  static constexpr int64_t kTileColumns = kTileVectors * kLanes;

  // Computes out = left right, or out += left right, in tiles of a few rows and vectors. Vectors of
  // `right` are read from a copy in which each row is padded to whole vectors.
  void tiles(const MatrixPlace& out, const MatrixPlace& left, const MatrixPlace& right) {
    const int64_t width = (right.columns + kTileColumns - 1) / kTileColumns * kTileColumns;
    pack(right, width);
    int64_t i = 0;
    for (; i + kTileRows <= out.rows; i += kTileRows) row_of_tiles<kTileRows>(out, left, i, width);
    for (; i < out.rows; ++i) row_of_tiles<1>(out, left, i, width);
  }

  void pack(const MatrixPlace& from, int64_t width) {
    packed_.resize(static_cast<size_t>(from.rows * width));
    const int64_t n = from.columns;
    for (int64_t k = 0; k < from.rows; ++k) {
      const T* row = data(from) + k * from.row;
      T* to = packed_.data() + k * width;
      if (from.column == 1) {
        std::copy(row, row + n, to);
      } else {
        for (int64_t j = 0; j < n; ++j) to[j] = row[j * from.column];
      }
      std::fill(to + n, to + width, T(0));
    }
  }

  template <int64_t kRows>
  void row_of_tiles(const MatrixPlace& out, const MatrixPlace& left, int64_t i, int64_t width) {
    for (int64_t j = 0; j < out.columns; j += kTileColumns) {
      std::array<V, kRows * kTileVectors> sums;
      sums.fill(V(0));
      const T* factor = data(left) + i * left.row;
      const T* columns = packed_.data() + j;
      for (int64_t k = 0; k < left.columns; ++k, factor += left.column, columns += width) {
        const V first = V::loadu(columns), second = V::loadu(columns + kLanes);
        for (int64_t r = 0; r < kRows; ++r) {
          const V x(factor[r * left.row]);
          V* sum = &sums[static_cast<size_t>(r * kTileVectors)];
          sum[0] = at::vec::fmadd(x, first, sum[0]);
          sum[1] = at::vec::fmadd(x, second, sum[1]);
        }
      }
      for (int64_t r = 0; r < kRows; ++r) {
        const V* sum = &sums[static_cast<size_t>(r * kTileVectors)];
        put_columns(out, i + r, j, sum[0]);
        put_columns(out, i + r, j + kLanes, sum[1]);
      }
    }
  }

  // Writes the SIMD vector `value` to row i of `out`, starting at column j. Ignores elements beyond
  // the last column.
  void put_columns(const MatrixPlace& out, int64_t i, int64_t j, const V& value) const {
    const int64_t lanes = std::min(kLanes, out.columns - j);
    if (lanes <= 0) return;
    T* to = data(out) + i * out.row + j * out.column;
    if (out.column == 1) return put(to, value, lanes);
    std::array<T, static_cast<size_t>(kLanes)> each;
    value.store(each.data());
    for (int64_t c = 0; c < lanes; ++c) put_one(to[c * out.column], each[static_cast<size_t>(c)]);
  }

  // Computes out = column row, or out += column row. Each product of two elements is added to 0, as
  // in a sum of several products.
  void outer(const MatrixPlace& out, const MatrixPlace& column, const MatrixPlace& row) {
    if (out.column != 1 && out.row == 1 && out.columns > 1) {
      return outer(out.transposed(), row.transposed(), column.transposed());
    }
    const T* v = contiguous(data(row), row.column, row.columns, vector_);
    for (int64_t i = 0; i < out.rows; ++i) {
      const T factor = data(column)[i * column.row];
      T* to = data(out) + i * out.row;
      if (out.column == 1 || out.columns == 1) {
        for_each_vector(out.columns, [&](int64_t j, int64_t lanes) {
          put(to + j, at::vec::fmadd(V(factor), load(v + j, lanes), V(0)), lanes);
        });
      } else {
        for (int64_t j = 0; j < out.columns; ++j) put_one(to[j * out.column], T(0) + factor * v[j]);
      }
    }
  }

  bool adds_ = false;
  std::vector<T> vector_, row_, packed_;
};

// Prefetches the operands. The matrix is usually not in the nearest caches, and the hardware cannot
// predict the address of the next matrix.
template <class T>
void prefetch_operands(const MatrixProduct& product) {
  for (const MatrixPlace* place : {&product.out, &product.left, &product.right}) {
    const int64_t elements = place->rows * place->columns;
    prefetch_row(place->data, static_cast<size_t>(elements) * sizeof(T));
  }
}

template <class T>
void run_each(c10::ArrayRef<MatrixProduct> products) {
  MatrixProductRun<T> run;
  for (size_t i = 0; i < products.size(); ++i) {
    if (i + 1 < products.size()) prefetch_operands<T>(products[i + 1]);
    run.run(products[i]);
  }
}

void run_product_kernel(c10::ArrayRef<MatrixProduct> products, c10::ScalarType dtype) {
  dtype == c10::ScalarType::Double ? run_each<double>(products) : run_each<float>(products);
}

}  // namespace
}  // namespace autobatch

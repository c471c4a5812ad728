// The product of a sparse matrix and a dense matrix, on a CPU.
#pragma once

#include <cstdint>

namespace autobatch {

// Computes out += matrix x, where x and `out` have dense rows of `width` numbers. Entry e of the
// matrix has the value values[e] at row to[e] and column from[e]. An index pair may occur several
// times. The caller checks the indices.
template <class T>
struct SparseProduct {
  const int64_t *to, *from;
  const T* values;
  int64_t count;  // number of entries of the matrix
  const T* x;
  T* out;
  int64_t width;
};

// Compilers vectorize the inner loop, so this function is compiled for each CPU capability
// (cpu_dispatch.h). The function has internal linkage, because its compiled versions differ.
template <class T>
static void add_sparse_product(const SparseProduct<T>& p) {
  for (int64_t e = 0; e < p.count; ++e) {
    const T value = p.values[e];
    const T* x = p.x + p.from[e] * p.width;
    T* out = p.out + p.to[e] * p.width;
    for (int64_t k = 0; k < p.width; ++k) out[k] += value * x[k];
  }
}

}  // namespace autobatch

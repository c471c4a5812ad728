// Products of a batch in which one side is a vector, or both are: each member's matrix is read, and
// its gradient added to, where it lies. Such a product is as fast as its matrix is read; a batched
// matrix product needs all of them side by side first, and its gradients in a buffer of their own.
// On CPUs with AVX2 or AVX-512, in float and double.
#pragma once

#include "autobatch/kernels/gather.h"

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace autobatch {

// Elements `row * i + column * j` of memory; a vector is a matrix of one column.
struct MatrixPlace {
  void* data = nullptr;
  int64_t rows = 1, columns = 1;
  int64_t row = 0, column = 0;

  MatrixPlace transposed() const { return {data, columns, rows, column, row}; }
};

// out = left right, or out += left right; `left` has one row, `right` one column, or they share a
// dimension of size 1.
struct VectorProduct {
  MatrixPlace out, left, right;
  bool adds = false;
};

// Runs them in order: several may add to the same memory. `apart`: none of them do, so they may run
// on the caller's threads.
void run_vector_products(c10::ArrayRef<VectorProduct> products, c10::ScalarType dtype, bool apart);

// Its part of them, in order (cpu_dispatch.h).
using VectorKernel = void (*)(c10::ArrayRef<VectorProduct>, c10::ScalarType);

}  // namespace autobatch

// Products of a batch in which one side is a vector, or both sides are. Each member's matrix is
// read in place, and its gradient is added in place. The time of such a product is the time to read
// its matrix. A batched matrix product would first copy all matrices side by side, and would need a
// separate buffer for their gradients. On CPUs with AVX2 or AVX-512, in float and double.
#pragma once

#include "autobatch/kernels/gather.h"

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace autobatch {

// A matrix in memory: element (i, j) lies `row * i + column * j` elements from `data`. A vector is
// a matrix with one column or one row.
struct MatrixPlace {
  void* data = nullptr;
  int64_t rows = 1, columns = 1;
  int64_t row = 0, column = 0;

  MatrixPlace transposed() const { return {data, columns, rows, column, row}; }
};

// out = left right, or out += left right if `adds`. Either `left` has one row, or `right` has one
// column, or the dimension that they share has size 1.
struct VectorProduct {
  MatrixPlace out, left, right;
  bool adds = false;
};

// Runs the products in order: several may add to the same memory. `apart`: no two products write to
// the same memory, so they may run in parallel (at::parallel_for).
void run_vector_products(c10::ArrayRef<VectorProduct> products, c10::ScalarType dtype, bool apart);

// Runs these products in order, on one thread (cpu_dispatch.h).
using VectorKernel = void (*)(c10::ArrayRef<VectorProduct>, c10::ScalarType);

}  // namespace autobatch

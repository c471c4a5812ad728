// Computes the products of a batch in which each member has its own matrices, of any sizes. The
// kernels read each matrix in place and add its gradient in place. The kernels are for vectors and
// small matrices, for which a BLAS call takes longer than the product itself. One BLAS call for
// several members would require a copy of their matrices into one tensor. The kernels exist for
// CPUs with AVX2 or AVX-512, in float and double. at::mm computes large products.
#pragma once

#include "autobatch/kernels/gather.h"

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// A matrix in memory: element (i, j) is `row * i + column * j` elements after `data`. A vector is a
// matrix with one column or one row.
struct MatrixPlace {
  void* data = nullptr;
  int64_t rows = 1, columns = 1;
  int64_t row = 0, column = 0;

  MatrixPlace transposed() const { return {data, columns, rows, column, row}; }
};

// The product out = left right, or out += left right if `adds` is true.
struct MatrixProduct {
  MatrixPlace out, left, right;
  bool adds = false;
};

// Runs the products in order, because several products may add to the same memory. `disjoint`:
// whether all products write to different memory. If so, they may run in parallel
// (at::parallel_for).
void run_matrix_products(c10::ArrayRef<MatrixProduct> products, c10::ScalarType dtype,
                         bool disjoint);

// Runs one product by at::mm, on new tensor objects for the matrices.
void multiply_by_library(const MatrixProduct& product, c10::ScalarType dtype);

// Runs these products in order, on one thread (cpu_dispatch.h).
using ProductKernel = void (*)(c10::ArrayRef<MatrixProduct>, c10::ScalarType);

}  // namespace autobatch

// Kernels of this library for the vector units of a CPU. The kernels are compiled twice: by
// kernels_avx2.cpp for AVX2, and by kernels_avx512.cpp for AVX-512.
#pragma once

#include "autobatch/kernels/elementwise_program.h"
#include "autobatch/kernels/matrix_products.h"
#include "autobatch/kernels/segment_softmax.h"
#include "autobatch/kernels/sparse_product.h"

namespace autobatch {

// Transposes n rows of m elements: to[j * to_step + i] = from[i * step + j].
using TurnKernel = void (*)(const float* from, int64_t step, int64_t n, int64_t m, float* to,
                            int64_t to_step);

// A product out = x matrix, or out += x matrix if `adds` is true. The sizes are [rows, columns] =
// [rows, depth] [depth, columns]. Each row is dense, and rows are `x_step`, `matrix_step` or
// `out_step` floats apart. `depth_step`: number of terms that are summed before their sum is added
// to `out`.
struct MultiplyBlock {
  const float *x, *matrix;
  float* out;
  int64_t rows, depth, columns;
  int64_t x_step, matrix_step, out_step;
  bool adds;
  int64_t depth_step;
};
using MultiplyKernel = void (*)(const MultiplyBlock&);

template <class T>
using SparseProductKernel = void (*)(const SparseProduct<T>&);

struct CpuKernels {
  ElementwiseKernel elementwise;
  ProductKernel matrix_products;
  SoftmaxKernel softmax;
  TurnKernel turn;
  MultiplyKernel multiply;  // null if oneDNN has a microkernel
  SparseProductKernel<float> sparse_product_float;
  SparseProductKernel<double> sparse_product_double;
};

extern const CpuKernels kernels_avx2;
extern const CpuKernels kernels_avx512;

// Returns the kernels for this CPU, or null if there are none. Kernels exist for float and double,
// for AVX2 and AVX-512. The environment variable ATEN_CPU_CAPABILITY affects the choice.
const CpuKernels* cpu_kernels();
bool has_cpu_kernels(c10::ScalarType dtype);

// Equal to ATen's grain size. For fewer elements than this, a second thread costs more time than it
// saves.
constexpr int64_t kGrainElements = 32768;

}  // namespace autobatch

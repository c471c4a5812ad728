// Kernels of our own for the vectors of a CPU: compiled once for each of ATen's CPU capabilities
// that have vectors, in kernels_avx2.cpp and kernels_avx512.cpp.
#pragma once

#include "autobatch/kernels/fused_elementwise.h"
#include "autobatch/kernels/gemv.h"

namespace autobatch {

// to[j * to_step + i] = from[i * step + j], of n rows of m.
using TurnKernel = void (*)(const float* from, int64_t step, int64_t n, int64_t m, float* to,
                            int64_t to_step);

// out (+)= x matrix, [rows, columns] (+)= [rows, depth] [depth, columns]: rows lie `step` floats
// apart, each dense. So many terms are summed at a time.
struct MultiplyBlock {
  const float *x, *matrix;
  float* out;
  int64_t rows, depth, columns;
  int64_t x_step, matrix_step, out_step;
  bool adds;
  int64_t depth_step;
};
using MultiplyKernel = void (*)(const MultiplyBlock&);

struct CpuKernels {
  PointwiseKernel pointwise;
  VectorKernel vector_products;
  TurnKernel turn;
  MultiplyKernel multiply;  // null where oneDNN has a microkernel
};

extern const CpuKernels kernels_avx2;
extern const CpuKernels kernels_avx512;

// Those for this CPU, or null if there are none: they are for float and double, with AVX2 or
// AVX-512. ATEN_CPU_CAPABILITY is heeded.
const CpuKernels* cpu_kernels();
bool has_cpu_kernels(c10::ScalarType dtype);

// As ATen's own grain: below that a second thread costs more than it saves.
constexpr int64_t kGrainElements = 32768;

}  // namespace autobatch

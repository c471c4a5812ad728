// Kernels of our own for the vectors of a CPU: compiled once for each of ATen's CPU capabilities
// that have vectors, in kernels_avx2.cpp and kernels_avx512.cpp.
#pragma once

#include "autobatch/pointwise.h"
#include "autobatch/vector_products.h"

namespace autobatch {

// to[j * to_step + i] = from[i * step + j], of n rows of m.
using TurnKernel = void (*)(const float* from, int64_t step, int64_t n, int64_t m, float* to,
                            int64_t to_step);

struct CpuKernels {
  PointwiseKernel pointwise;
  VectorKernel vector_products;
  TurnKernel turn;  // with AVX-512 alone, as multiply.h has no use for it elsewhere
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

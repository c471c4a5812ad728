// Kernels of our own for the vectors of a CPU: compiled once for each of ATen's CPU capabilities
// that have vectors, in kernels_avx2.cpp and kernels_avx512.cpp.
#pragma once

#include "autobatch/pointwise.h"
#include "autobatch/vector_products.h"

namespace autobatch {

struct CpuKernels {
  PointwiseKernel pointwise;
  VectorKernel vector_products;
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

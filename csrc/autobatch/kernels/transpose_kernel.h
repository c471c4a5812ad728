// Transposes a matrix, for one CPU capability. Only kernels_avx2.cpp and kernels_avx512.cpp include
// this file. Each of these files is compiled for one capability, with ATen's macros for this
// capability.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

namespace autobatch {
namespace {

void turn(const float* from, int64_t step, int64_t n, int64_t m, float* to, int64_t to_step) {
  at::vec::transpose_mxn<float>(from, step, to, to_step, static_cast<int>(n), static_cast<int>(m));
}

}  // namespace
}  // namespace autobatch

#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/Version.h>

#include <string>

namespace autobatch {
namespace {

const CpuKernels* find_kernels() {
#if defined(__x86_64__)
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return &kernels_avx512;
  if (capability == "AVX2") return &kernels_avx2;
#endif
  return nullptr;
}

}  // namespace

const CpuKernels* cpu_kernels() {
  static const CpuKernels* kernels = find_kernels();
  return kernels;
}

bool has_cpu_kernels(c10::ScalarType dtype) {
  const bool has_type = dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  return has_type && cpu_kernels() != nullptr;
}

}  // namespace autobatch

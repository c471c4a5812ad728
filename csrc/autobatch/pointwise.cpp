// Elementwise passes: blocks of rows, threads, and which kernel.
#include "autobatch/pointwise.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>

namespace autobatch {
namespace {

// What the steps of one block write: it stays in a core's own cache, and a step's loops are long
// beside what starting them costs.
constexpr int64_t kBlockBytes = int64_t{1} << 16;
// As ATen's own grain: below that a second thread costs more than it saves.
constexpr int64_t kGrainElements = 32768;

// Null if there is none for this CPU.
PointwiseKernel find_kernel() {
#if defined(__x86_64__)
  const std::string capability = at::get_cpu_capability();  // ATEN_CPU_CAPABILITY is heeded
  if (capability == "AVX512") return pointwise_kernel_avx512;
  if (capability == "AVX2") return pointwise_kernel_avx2;
#endif
  return nullptr;
}

PointwiseKernel the_kernel() {
  static const PointwiseKernel kernel = find_kernel();
  return kernel;
}

}  // namespace

bool can_run_pointwise(c10::ScalarType dtype) {
  const bool has_type = dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  return has_type && the_kernel() != nullptr;
}

void run_pointwise(const PointwiseProgram& program) {
  const auto element = static_cast<int64_t>(c10::elementSize(program.dtype));
  const int64_t width = std::max<int64_t>(program.width, 1);
  const int64_t block = std::clamp<int64_t>(kBlockBytes / (width * element), 1, program.rows);
  at::parallel_for(0, program.rows, std::max(block, kGrainElements / width),
                   [&](int64_t first, int64_t last) {
                     const auto bytes = static_cast<size_t>(program.temporary * block * element);
                     const auto scratch = std::make_unique_for_overwrite<std::byte[]>(bytes);
                     the_kernel()(program, first, last, block, scratch.get());
                   });
}

}  // namespace autobatch

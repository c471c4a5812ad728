// Divides the rows of elementwise programs into blocks, and distributes the blocks among threads.
#include "autobatch/kernels/elementwise_program.h"

#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstddef>
#include <memory>

namespace autobatch {
namespace {

// Bytes that the steps of one block write. A block of this size stays in the private cache of a
// core. The loops over a block are long enough that the cost of starting a loop is small.
constexpr int64_t kBlockBytes = int64_t{1} << 16;

}  // namespace

void run_elementwise(const ElementwiseProgram& program) {
  const auto element = static_cast<int64_t>(c10::elementSize(program.dtype));
  const int64_t width = std::max<int64_t>(program.width, 1);
  const int64_t block = std::clamp<int64_t>(kBlockBytes / (width * element), 1, program.rows);
  at::parallel_for(0, program.rows, std::max(block, kGrainElements / width),
                   [&](int64_t first, int64_t last) {
                     const auto bytes = static_cast<size_t>(program.temporary * block * element);
                     const auto scratch = std::make_unique_for_overwrite<std::byte[]>(bytes);
                     cpu_kernels()->elementwise(program, first, last, block, scratch.get());
                   });
}

}  // namespace autobatch

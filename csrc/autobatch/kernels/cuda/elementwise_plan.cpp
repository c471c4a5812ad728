#include "autobatch/kernels/cuda/elementwise_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace autobatch::cuda {
namespace {

// Number of elements that a thread block computes in each step, if there are enough rows to keep a
// large GPU busy (kManyBlocks). With fewer rows, each block has one row, so that the blocks finish
// sooner.
constexpr int64_t kElementsOfBlock = 1024;
constexpr int64_t kManyBlocks = 264;  // two for each multiprocessor of an H100

int64_t rows_per_block(const ElementwiseProgram& program, int64_t row_bytes) {
  int64_t widest = 1;
  for (const ElementwiseStep& step : program.steps)
    widest = std::max(widest, step.mid * step.inner);
  const int64_t wanted = std::min(kElementsOfBlock / widest, program.rows / kManyBlocks);
  const int64_t fitting = row_bytes > 0 ? kMostSharedBytes / row_bytes : wanted;
  return std::max<int64_t>(1, std::min(wanted, fitting));
}

}  // namespace

std::optional<Element> element_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
      return Element::kHalf;
    case c10::ScalarType::BFloat16:
      return Element::kBFloat16;
    case c10::ScalarType::Float:
      return Element::kFloat;
    case c10::ScalarType::Double:
      return Element::kDouble;
    default:
      return std::nullopt;
  }
}

ElementwisePlan plan_elementwise(const ElementwiseProgram& program) {
  const auto element = static_cast<int64_t>(c10::elementSize(program.dtype));
  const int64_t rows = rows_per_block(program, program.temporary * element);
  ElementwisePlan out;
  out.task.element = *element_of(program.dtype);
  out.task.rows = program.rows;
  out.task.rows_per_block = static_cast<int32_t>(rows);
  // The size is rounded up, so that the memory of each block is aligned to 16 bytes.
  const int64_t bytes = (program.temporary * rows * element + 15) / 16 * 16;
  TORCH_CHECK(bytes <= INT32_MAX, "torch_autobatch: an elementwise program needs ", bytes,
              " bytes of temporary memory per thread block, which is too much");
  out.task.scratch_bytes = static_cast<int32_t>(bytes);
  const auto num_steps = static_cast<int64_t>(program.steps.size());
  if (bytes > kMostSharedBytes || num_steps > kMostKernelSteps) {
    out.scratch_bytes = bytes * ((program.rows + rows - 1) / rows);
  }
  const auto place = [&](const ElementwisePlace& from) {
    KernelPlace to{};
    to.temporary = from.data == nullptr;
    to.address = to.temporary ? static_cast<uint64_t>((from.before * rows + from.offset) * element)
                              : reinterpret_cast<uint64_t>(from.data);
    to.row = static_cast<int32_t>(from.row);
    to.mid = static_cast<int32_t>(from.mid);
    return to;
  };
  out.steps.reserve(program.steps.size());
  for (const ElementwiseStep& step : program.steps) {
    // Blocks do not wait for each other, so a step of a program can't sum over rows.
    TORCH_INTERNAL_ASSERT(step.out.row != 0 || program.rows == 1);
    out.steps.push_back({step.op.number, step.op.scale, place(step.out), place(step.a),
                         place(step.b), static_cast<int32_t>(step.mid),
                         static_cast<int32_t>(step.inner), step.op.code});
  }
  return out;
}

}  // namespace autobatch::cuda

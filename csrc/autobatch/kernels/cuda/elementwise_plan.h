// Converts elementwise programs to tasks for the CUDA kernel (elementwise.h).
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/cuda/elementwise.h"
#include "autobatch/kernels/elementwise_program.h"

#include <optional>
#include <vector>

namespace autobatch::cuda {

struct ElementwisePlan {
  KernelTask task{};
  std::vector<KernelStep> steps;
  // Size of the memory that `task.scratch` must point to, for the temporaries of all blocks. 0 if
  // the temporaries are in shared memory.
  int64_t scratch_bytes = 0;
};

AUTOBATCH_INTERNAL std::optional<Element> element_of(c10::ScalarType type);

// Returns the plan for a program. `element_of` must support the dtype of the program, and a row
// must have less than 2^31 elements.
AUTOBATCH_INTERNAL ElementwisePlan plan_elementwise(const ElementwiseProgram& program);

}  // namespace autobatch::cuda

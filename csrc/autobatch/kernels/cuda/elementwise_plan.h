// Elementwise passes as tasks for the CUDA kernel (elementwise.h).
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/cuda/elementwise.h"
#include "autobatch/kernels/fused_elementwise.h"

#include <optional>
#include <vector>

namespace autobatch::cuda {

struct ElementwisePlan {
  ElementwiseTask task{};
  std::vector<ElementwiseStep> steps;
  // Of all blocks, for temporaries that do not fit into shared memory: `task.scratch` is to point
  // to so many bytes. Else 0.
  int64_t scratch_bytes = 0;
};

AUTOBATCH_INTERNAL std::optional<Element> element_of(c10::ScalarType type);

// The program has a dtype of `element_of`, and less than 2^31 elements in a row.
AUTOBATCH_INTERNAL ElementwisePlan plan_elementwise(const PointwiseProgram& program);

}  // namespace autobatch::cuda

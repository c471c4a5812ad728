// Values that are known while ops are captured, because they follow from graph inputs and
// factories, as most masks and indices do. They are computed on demand, op by op and without a
// flush.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <unordered_map>

namespace autobatch {

class Scope;

// The known values computed so far, by ValueId. Valid for one Graph::numbering().
struct KnownValues {
  uint64_t numbering = 0;
  std::unordered_map<uint32_t, at::Tensor> values;
};

// Returns the value of the tensor: the tensor itself if it is not pending. Returns an undefined
// tensor if computing the value takes more than a few small ops on known values. The result may
// share memory with the graph's values, so the caller must not write to the result.
at::Tensor known_value(Scope& scope, const at::Tensor& tensor);

// Replaces the pending arguments of `op` on the stack by their values. Returns false, with nothing
// changed, unless the op only reads its arguments and all values are known.
bool put_known_values(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

// For `x[indices]` and similar ops: replaces known masks by the indices of their true elements, as
// eager's kernels do. Returns false if a known index is out of range, or if a mask does not have
// the shape of the dimensions that it indexes. In these cases eager raises the error.
bool prepare_indices(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

}  // namespace autobatch

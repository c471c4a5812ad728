// Known values are values that depend only on graph inputs and results of factories. Most masks and
// indices are known values. While ops are captured, known values are computed on demand, op by op
// and without a flush.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <unordered_map>

namespace autobatch {

class Scope;

// The known values computed so far, by ValueId. The entries are valid for one Graph::numbering().
struct KnownValues {
  uint64_t numbering = 0;
  std::unordered_map<uint32_t, at::Tensor> values;
};

// Returns the value of the tensor. If the tensor is not pending, returns the tensor itself. Returns
// an undefined tensor if computing the value takes more than a few small ops on known values. The
// result may share memory with the graph's values, so the caller must not write to the result.
at::Tensor known_value(Scope& scope, const at::Tensor& tensor);

// Replaces the pending arguments of `op` on the stack with their values. Returns false and changes
// nothing if `op` does more than read its arguments, or if a value is not known.
bool put_known_values(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

// For ops like `x[indices]`, replaces each known mask with the indices of its true elements, as
// eager's kernels do. Returns false if a known index is out of range, or if a mask does not have
// the shape of the dimensions that it indexes. Eager raises an error for such an index or mask.
bool prepare_indices(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

}  // namespace autobatch

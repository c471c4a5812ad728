// What is known while ops are captured: values that follow from graph inputs and factories, as
// masks and indices mostly do. They are computed where somebody asks, op by op and without a flush.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <unordered_map>

namespace autobatch {

class Scope;

// Computed before, by the numbers of values that the graph gave.
struct KnownValues {
  uint64_t numbering = 0;
  std::unordered_map<uint32_t, at::Tensor> values;
};

// What the tensor holds: itself, if it is not pending; undefined if that takes more than a few
// small ops on what is known. Shares memory with the graph's values: only to be read.
at::Tensor known_value(Scope& scope, const at::Tensor& tensor);

// Puts what pending arguments (the last `count` of the stack) hold in their place, for an op that
// only reads them. False, with nothing changed, unless all of them are known.
bool put_known_values(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

// For `x[indices]` and kin: puts the indices of true elements in place of known masks, as eager's
// kernels do. False if the indices, as far as they are known, are out of range or the masks of
// another shape: then eager raises the error.
bool prepare_indices(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

}  // namespace autobatch

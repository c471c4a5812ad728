// One call of an op over detached operands, with the graph that autograd records for it: for rules
// that have no gradient formula of their own.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/rules/rule.h"

#include <ATen/core/stack.h>

#include <vector>

namespace autobatch {

// The op's arguments with `operands` in their slots.
torch::jit::Stack rebuild(const Signature& signature, at::ArrayRef<at::Tensor> operands);

// The tensors of the results, those of a list one by one.
std::vector<at::Tensor> results_of(const torch::jit::Stack& stack);

// An operand for a call: detached, and a leaf of the local graph if it needs a gradient.
at::Tensor leaf(const at::Tensor& tensor, bool needs_grad);

// Gradients of the local graph's inputs for gradients of its outputs; undefined: none came. `cut`:
// an output that others are computed from, whose gradient is whole already.
std::vector<at::Tensor> differentiate(const LocalGraph& graph, std::vector<at::Tensor> gradients,
                                      uint32_t cut = kNone);

// What the gradient of one output contributes to that of another one, which it is computed from.
at::Tensor chain_gradient(const LocalGraph& graph, Rule::ResultDependency dependency,
                          const at::Tensor& gradient);

}  // namespace autobatch

// Functions for rules without a gradient formula. An op is called once on detached operands, and
// autograd records the graph of this call.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/rules/rule.h"

#include <ATen/core/stack.h>

#include <vector>

namespace autobatch {

// Returns the op's arguments with `operands` in their slots.
torch::jit::Stack rebuild(const Signature& signature, at::ArrayRef<at::Tensor> operands);

// Returns the result tensors that the stack contains. Lists are flattened.
std::vector<at::Tensor> results_of(const torch::jit::Stack& stack);

// Returns the tensor as an operand of a local call. The returned tensor is detached. If
// `needs_grad` is set, it is a leaf that requires grad.
at::Tensor leaf(const at::Tensor& tensor, bool needs_grad);

// Computes the gradients of the local graph's inputs from the gradients of its outputs. An
// undefined tensor means no gradient. `cut` is an output whose gradient is already complete, and
// from which other outputs are computed. The contributions of the other outputs to the gradient of
// `cut` are ignored.
std::vector<at::Tensor> differentiate(const LocalGraph& graph, std::vector<at::Tensor> gradients,
                                      uint32_t cut = kNone);

// `gradient` is the gradient of output `dependency.result`. Computes its contribution to the
// gradient of output `dependency.from`.
at::Tensor chain_gradient(const LocalGraph& graph, Rule::ResultDependency dependency,
                          const at::Tensor& gradient);

}  // namespace autobatch

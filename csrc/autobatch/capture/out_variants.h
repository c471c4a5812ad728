// Ops that write their result to a given tensor: `torch.cumsum(x, 0, out=y)`.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/stack.h>

namespace autobatch {

// If the op is an out variant (WriteKind::kOut), runs its functional counterpart and a copy, which
// are captured. Else returns false, as it does if eager also resizes the given tensor, casts to its
// dtype or raises an error, or if operands share memory with the given tensor. The arguments are
// then still on the stack.
bool run_out_variant(const OpInfo& op, torch::jit::Stack& stack);

}  // namespace autobatch

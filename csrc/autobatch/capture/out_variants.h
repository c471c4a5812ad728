// Ops that write their result to a given tensor: `torch.cumsum(x, 0, out=y)`.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/stack.h>

namespace autobatch {

// If the op is an out variant (WriteKind::kOut), captures its functional counterpart and a copy to
// the given tensor. Returns false, and leaves the arguments on the stack, if the op is not an out
// variant, or if an operand shares memory with the given tensor. Also returns false if eager would
// resize the given tensor, cast the result to its dtype, or raise an error.
bool run_out_variant(const OpInfo& op, torch::jit::Stack& stack);

}  // namespace autobatch

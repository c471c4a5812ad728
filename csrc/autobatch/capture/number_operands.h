// Passes numbers that vary as tensors (graph/varying_numbers.h).
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/stack.h>

namespace autobatch {

class Scope;

// If the number of the call varies, replaces the number on the stack with a tensor, calls the op
// for tensors, and returns true. Otherwise returns false, with nothing done. Calls on ordinary data
// are changed only if they are captured (set_captures_data).
bool call_with_number_as_tensor(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

}  // namespace autobatch

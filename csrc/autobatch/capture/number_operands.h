// Passes numbers that vary as tensors (graph/varying_numbers.h).
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/stack.h>

namespace autobatch {

class Scope;

// If the call has a number that varies, replaces the number on the stack with a tensor, calls the
// op's overload for tensors, and returns true. Otherwise changes nothing and returns false. If the
// call gets only ordinary data, the number is replaced only if such calls are captured
// (set_captures_data).
bool call_with_number_as_tensor(Scope& scope, const OpInfo& op, torch::jit::Stack* stack);

}  // namespace autobatch

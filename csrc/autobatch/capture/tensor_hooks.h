// Hooks of pending tensors (`Tensor.register_hook`). A node behind the tensor's op calls the hooks
// in backward (rules/captured_function.h), and the tensor stands for the result of this node.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

// Whether a node can stand for hooks of the pending tensor. Ops must be captured now, and nothing
// else may refer to the tensor's value: no other tensor shares its memory, no op has read or
// written it, its op has no other results, and it is not computed.
AUTOBATCH_INTERNAL bool may_capture_hooks(const at::Tensor& tensor);
// Makes the pending tensor stand for the value of `result`, which must not be used any more.
// Returns false if `result` is not pending.
AUTOBATCH_INTERNAL bool replace_value(const at::Tensor& tensor, const at::Tensor& result);

}  // namespace autobatch

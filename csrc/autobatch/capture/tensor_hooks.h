// Hooks of pending tensors (`Tensor.register_hook`). A node behind the tensor's op calls the hooks
// in backward (rules/captured_function.h), and the tensor stands for the result of this node.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

// Whether ops are captured now, and nothing else refers to the value of the pending tensor: no
// other tensor shares its memory, no op has read or written it, and it is not computed.
AUTOBATCH_INTERNAL bool is_unused(const at::Tensor& tensor);
// Makes the pending tensor stand for the value of `result`, which must not be used any more.
// Returns false if `result` is not pending.
AUTOBATCH_INTERNAL bool replace_value(const at::Tensor& tensor, const at::Tensor& result);

}  // namespace autobatch

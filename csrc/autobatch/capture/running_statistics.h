// Captures `batch_norm` in training on a pending tensor. The op is captured as if it kept no
// running statistics. The mean and the variance of the batch are captured too. They update the
// running statistics later (memory_updates.h).
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;

// Captures a call of `op` and sets `result`. Returns false, with nothing changed, if the call has
// to run eagerly.
bool record_batch_norm(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                       at::Tensor& result);

}  // namespace autobatch

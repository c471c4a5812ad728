// The generic rules, which run every op without a native rule. The rule "functorch" (functorch.cpp)
// runs a batch as one call. The rule "loop" (loop.h) makes one call per member. generic.cpp chooses
// the rule for each op. If functorch cannot run a batch, the rule "loop" runs the batch
// (functorch.cpp).
#pragma once

#include "autobatch/rules/local_autograd.h"
#include "autobatch/rules/rule.h"

namespace autobatch {

// Whether the op represents a custom autograd.Function (csrc/python/custom_functions.h).
bool is_custom_function(const OpInfo& op);

// Runs member m of the batch as eager does. Returns the results and does not write them to the
// slabs.
LocalGraph call_single(const BatchView& batch, int64_t m, bool needs_grad);

bool is_optional_tensor_list(const c10::Type& type);

// Captures the call. Adds the tensors as operands, and adds their shapes and all other arguments to
// the key. Returns false if the call cannot be captured in this form.
bool capture_all_arguments(NodeBuilder& builder);

// The rule of an op for which functorch computes the same values as eager, but not the same
// gradient. Batches that need a gradient run as a loop.
const Rule& differentiated_loop_rule();
// The rule of lstm_cell on a device that has a kernel for it.
const Rule& kernel_cell_rule();
// functorch_rule() for lstm_cell. The result h' of this op depends on the result c'.
const Rule& functorch_lstm_cell_rule();

}  // namespace autobatch

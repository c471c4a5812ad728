// Helpers shared by the generic rules, which cover every op without a native rule.
#pragma once

#include "autobatch/rules/local_autograd.h"
#include "autobatch/rules/rule.h"

namespace autobatch {

// Whether the op stands for a custom autograd.Function (csrc/python/custom_functions.h).
bool is_custom_function(const OpInfo& op);

// Runs member m of the batch as eager does. The results are returned and not written to the slabs.
LocalGraph call_single(const BatchView& batch, int64_t m, bool record);

bool is_optional_tensor_list(const c10::Type& type);

// Captures the call with every argument in the signature. Returns false if the op must not be
// captured as a whole.
bool capture_everything(NodeBuilder& builder);

}  // namespace autobatch

// Captures `masked_select` of a pending tensor by a mask whose values are known (known_values.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;
struct OpInfo;

// Captures the call as an `index_select` of the elements at which the mask is true, and returns the
// result. Returns an undefined tensor, with nothing captured, if `op` is not `masked_select`, if
// the mask's values are not known, or if eager has to check the arguments.
at::Tensor record_masked_select(Scope& scope, const OpInfo& op,
                                at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch

// `masked_select` of a pending tensor by a mask whose values are known (known_values.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;
struct OpInfo;

// Captures the call, as a lookup of the elements where the mask is true. Undefined, with nothing
// captured, if it is another op, or one that needs values.
at::Tensor record_masked_select(Scope& scope, const OpInfo& op,
                                at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch

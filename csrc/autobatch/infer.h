// What an op's results will look like, without running it on data.
#pragma once

#include "autobatch/op_info.h"
#include "autobatch/rules.h"
#include "autobatch/views.h"

#include <ATen/core/stack.h>

namespace autobatch {

// The results of the op on arguments of this metadata: from its Meta kernel (`on_meta`), or from
// running it once on zeros (autocast's casts are not seen by a Meta tensor). `list` is set if the
// op returns one Tensor[]. False if that can't be told without data; raises what the op raises.
bool infer_results(const Draft& draft, bool on_meta, std::vector<ResultMeta>& results, bool& list);

// The view that a view op makes, through its Meta kernel. Outcome kAsk if it is not a view of
// argument 0's memory with argument 0's dtype.
void infer_view(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, ViewResult& result);

}  // namespace autobatch

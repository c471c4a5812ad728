// What an op's results will look like, without running it on data.
#pragma once

#include "autobatch/capture/call_cache.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/view_ops.h"
#include "autobatch/rules/rule.h"

#include <ATen/core/stack.h>

namespace autobatch {

// The results of the op on arguments of this metadata: those of eager's own kernels on zeros, and
// on ones if the sizes might follow from the values. Most Meta kernels are written in Python, and
// the first of them imports PyTorch's compiler; they take more than eager does, and give other
// strides. So they are asked only for large operands, where they import nothing. `list` is set if
// the op returns one Tensor[]. False if it can't be told, if a result is an argument or a view of
// one, or if the op raises an error.
bool infer_results(const NodeBuilder& builder, std::vector<ResultMeta>& results, bool& list);

// Whether this thread runs an op for nothing but its results' metadata.
AUTOBATCH_INTERNAL bool is_trying();

// The views that a view op makes, by address arithmetic or through its Meta kernel. Outcome kAsk if
// they are not views of argument 0's memory with argument 0's dtype, or the arguments are wrong.
void infer_views(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, ViewResult& result);
// Of those views, if argument 0 is pending, requires grad and shares memory with itself, or is a
// view of what does: where their elements are among that value's (Apart), which stays empty if it
// can't be told. False if it depends on more than argument 0's geometry.
bool infer_aparts(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, Graph& graph,
                  c10::SmallVectorImpl<CachedCall::View>& views);

}  // namespace autobatch

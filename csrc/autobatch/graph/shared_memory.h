// Handles views that interpret their memory differently from their base: view_as_complex(),
// view_as_real() and conj(). In a graph, all values of one base have the same interpretation. So
// these ops become nodes that copy the memory (rules/complex_views.cpp). At the flush, the tensors
// of the copy get the memory of the original tensor (execute/materialize.cpp). A write to shared
// memory changes real tensors, but not values of the graph. So all tensors that share memory become
// real together, before any write to one of them.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/graph.h"

namespace autobatch {

// Fills in Tape::sharers, which maps a base to the results that share its memory in eager mode.
// Must be called after `tape` was made from `from` and its values were renumbered.
void find_sharers(Tape& tape, const Tape& from);

// If `base` is the result of an op with OpInfo::reinterprets, returns the op's operand. Otherwise
// returns kNone.
ValueId reinterpreted_value(const Tape& tape, ValueId base);
// Returns the owner of the memory that `base` shares in eager mode, or `base` itself if it does not
// share memory.
ValueId memory_owner(const Tape& tape, ValueId base);
// Whether the values of `base` are the conjugates of the values in its memory in eager mode.
bool is_conjugated(const Tape& tape, ValueId base);
bool is_conjugated(const at::Tensor& tensor);  // is_conjugated() of the base of a pending tensor
// Whether the pending tensor shares the memory of a value that is not its base in the graph.
bool shares_memory(const at::Tensor& tensor);
// Whether two tensors share memory in eager mode. At least one of the two tensors must be pending.
AUTOBATCH_INTERNAL bool share_memory(const at::Tensor& a, const at::Tensor& b);

// Whether a pending tensor stands for a result that shares the memory of `base`.
bool is_shared(const Tape& tape, ValueId base);
// Whether is_shared() is true for any base of the tape.
bool has_shared_memory(const Tape& tape);

}  // namespace autobatch

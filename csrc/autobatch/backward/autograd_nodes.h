// Creates the autograd nodes of a flush: HeldNodes for the held values, ExitNodes for the levels
// through which gradients of held values flow, and WeightsNodes for sets of weights. See
// docs/design.md, section 7.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/common/compat.h"

#include <memory>
#include <vector>

namespace autobatch {

// The base of views that the user holds, if the user does not hold the base itself. An in-place
// write to one of the views becomes part of the base's autograd history.
struct HiddenRoot {
  ValueId value = kNone;
  size_t view = 0;  // index into FlushRecord::held of the first of these views, in order of capture
};

// Plans the levels of `record` and creates the autograd nodes. FlushRecord::held must already list
// the held values that require grad. `leaves`: for each held value, the edge to its AccumulateGrad
// if its tensor is a leaf (is_leaf), and an invalid edge otherwise. Returns the gradient edges of
// the held values, followed by the edges of the hidden roots.
std::vector<torch::autograd::Edge> make_autograd_nodes(
    const std::shared_ptr<FlushRecord>& record, const std::vector<HiddenRoot>& hidden,
    const std::vector<torch::autograd::Edge>& leaves);

// Adds a backward pass to the count in the report of this thread's open scope, if there is one
// (scope/scope.cpp). Called when a backward pass reaches a flush.
void note_backward_call();

}  // namespace autobatch

// Autograd's view of a flush: one node for each held value, one for each level of nodes, and one
// where the gradients of graph inputs leave. See docs/design.md, section 7.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/common/compat.h"

#include <memory>
#include <vector>

namespace autobatch {

// The memory that views held by the user are of, where nobody holds it as a whole: a write to one
// of them is part of its history.
struct HiddenRoot {
  ValueId value = kNone;
  size_t view = 0;  // into FlushRecord::held: one that no other of the views is on the way to
};

// Sets up levels for `record` (whose `held` lists the held values that require grad) and makes
// the autograd nodes. Returns the edge that each held value gets, then that of each hidden root.
std::vector<torch::autograd::Edge> make_autograd_nodes(const std::shared_ptr<FlushRecord>& record,
                                                       const std::vector<HiddenRoot>& hidden);

// A backward pass has come to a flush: the open scope of this thread, if there is one, counts it in
// its report (scope/scope.cpp).
void note_backward_call();

}  // namespace autobatch

// Autograd's view of a flush: one node for each held value, one for each level of nodes, and one
// where the gradients of outside tensors leave. See docs/design.md, section 7.
#pragma once

#include "autobatch/backward.h"
#include "autobatch/compat.h"

#include <memory>
#include <vector>

namespace autobatch {

// Sets up levels for `record` (whose `held` lists the held values that require grad) and makes
// the autograd nodes. Returns the edge that each held value gets.
std::vector<torch::autograd::Edge> make_autograd_nodes(const std::shared_ptr<FlushRecord>& record);

}  // namespace autobatch

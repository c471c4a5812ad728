// Finds numbers that prevent nodes from sharing a batch (graph/varying_numbers.h).
#pragma once

#include "autobatch/graph/varying_numbers.h"
#include "autobatch/plan/flush_graph.h"

namespace autobatch {

// Adds the numbers that vary in this graph to `numbers`, for later calls. Returns how many numbers
// were added. The graph itself does not change.
size_t find_varying_numbers(const Tape& tape, const FlushGraph& graph, VaryingNumbers& numbers);

}  // namespace autobatch

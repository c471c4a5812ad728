// Batches of one op that differ in their weights alone, such as the linear layers of experts: run
// as one batch, whose members stand weight by weight. What goes into it is gathered once, its
// results lie in one slab, and there is one call for each weight.
#pragma once

#include "autobatch/plan/flush_graph.h"

#include <cstddef>

namespace autobatch {

// Joins such batches where the schedule has them one after the other and none waits for another.
// Those of the same inputs stay apart: these need not be gathered twice. So does a second one of
// the same weights.
void join_weight_groups(FlushRecord& record, size_t first_batch, const FlushGraph& graph);

}  // namespace autobatch

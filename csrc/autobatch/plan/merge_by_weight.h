// Joins batches of one op that differ only in their weights, such as the linear layers of experts,
// into one batch whose members are grouped by weight. The inputs are gathered once, the results are
// stored in one slab, and there is one call for each weight.
#pragma once

#include "autobatch/plan/flush_graph.h"

#include <cstddef>

namespace autobatch {

// Joins consecutive batches of the schedule that do not depend on each other. Batches with the same
// inputs stay separate, because a joined batch would gather these inputs twice. A batch also stays
// separate if a batch with the same weights is already part of the joined batch. Returns the number
// of batches that were joined to an earlier batch.
size_t merge_by_weight(FlushRecord& record, size_t first_batch, const FlushGraph& graph);

}  // namespace autobatch

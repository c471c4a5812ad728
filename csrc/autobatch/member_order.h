// In which order the members of a batch stand: as those do that read their results, so that these
// find them side by side and need not gather them.
#pragma once

#include "autobatch/backward.h"
#include "autobatch/run_graph.h"

#include <span>

namespace autobatch {

// Members of one weight (weight_groups.h) stay together. `batches`: those that the graph runs as.
void order_members(RunGraph& graph, std::span<const BatchRecord> batches);

}  // namespace autobatch

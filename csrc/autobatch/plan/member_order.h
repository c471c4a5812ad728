// In which order the members of a batch stand: as those do that read their results, so that these
// find them side by side and need not gather them.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/rules/flush_record.h"

#include <span>
#include <vector>

namespace autobatch {

// Of a node: where the first that reads its results stands, of those that want to find them side by
// side, and which batch is the first to read them at all.
struct FirstUse {
  uint32_t place = kNone;
  uint32_t batch = kNone;
};

// Members of one weight (merge_by_weight.h) stay together. `batches`: those that the graph runs as.
// By node.
std::vector<FirstUse> order_members(FlushGraph& graph, std::span<const BatchRecord> batches);

}  // namespace autobatch

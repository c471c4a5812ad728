// Memory planning. Before a flush runs, chooses the memory of all results of its batches, and the
// lifetime of this memory.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/rules/flush_record.h"

namespace autobatch {

// The inputs of place_values, without the record.
struct PlacementNeeds {
  size_t first_batch = 0;  // the batches before this batch have already run
  const FlushGraph& graph;
  bool keep_all = false;  // whether slabs are freed only at the end of the flush
  // The values that tensors hold, possibly with duplicates. May be set only if no node of a later
  // flush reads a result. If `held` is null, place_values searches for the values that tensors
  // hold.
  const std::vector<ValueId>* held = nullptr;
};

// Fills FlushRecord::store for the batches from `first_batch` on.
void place_values(FlushRecord& record, const PlacementNeeds& needs);

}  // namespace autobatch

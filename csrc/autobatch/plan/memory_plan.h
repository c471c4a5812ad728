// Where results lie, and for how long: decided for all batches of a flush before it runs.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/rules/flush_record.h"

namespace autobatch {

// What place_values has to know besides the record.
struct PlacementNeeds {
  size_t first_batch = 0;  // the batches before were run already
  const FlushGraph& graph;
  bool keep_all = false;  // no slab is dropped before the end of the flush
  // The results that tensors look at, some perhaps more than once, where nothing is read later.
  // Null: they are searched for.
  const std::vector<ValueId>* held = nullptr;
};

// Fills in the record's store from its batches.
void place_values(FlushRecord& record, const PlacementNeeds& needs);

}  // namespace autobatch

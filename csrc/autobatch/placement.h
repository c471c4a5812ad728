// Where results lie, and for how long: decided for all batches of a flush before it runs.
#pragma once

#include "autobatch/backward.h"

namespace autobatch {

// What place_values has to know besides the record.
struct PlacementNeeds {
  size_t first_batch = 0;     // the batches before were run already
  size_t num_signatures = 0;  // they are numbered (Signature::local)
  bool keep_all = false;      // no slab is dropped before the end of the flush
  // By value: whether nodes that are not run now read it. May be empty.
  std::span<const uint8_t> read_later = {};
};

// Fills in the record's store from its batches.
void place_values(FlushRecord& record, const PlacementNeeds& needs);

}  // namespace autobatch

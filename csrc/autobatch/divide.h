// Batches whose results take much memory, and are read at different times, in parts: each runs when
// the first of its results is read, and what it computed goes when all of them were. So it is with
// the gradients in backward, which runs the batches in reverse.
#pragma once

#include "autobatch/backward.h"
#include "autobatch/run_graph.h"

#include <cstddef>

namespace autobatch {

// The batches from `first_batch` on, whose members have to be in their order (member_order.h).
void divide_batches(FlushRecord& record, size_t first_batch, RunGraph& graph);

}  // namespace autobatch

// Batches whose results take much memory, and are read at different times, in parts: each runs when
// the first of its results is read, and what it computed goes when all of them were. So it is with
// the gradients in backward, which runs the batches in reverse.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/plan/member_order.h"
#include "autobatch/rules/flush_record.h"

#include <cstddef>
#include <span>

namespace autobatch {

// The batches from `first_batch` on, whose members are in their order; what that says of nodes.
void divide_batches(FlushRecord& record, size_t first_batch, FlushGraph& graph,
                    std::span<const FirstUse> first_uses);

}  // namespace autobatch

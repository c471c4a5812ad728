// Divides a batch into parts if its results are large and are read at different times. To lower
// peak memory, each part runs right before the first read of its results, and the results are freed
// after their last read. Backward runs the batches in reverse order, so the division also lowers
// the memory of gradients.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/plan/member_order.h"
#include "autobatch/rules/flush_record.h"

#include <cstddef>
#include <span>

namespace autobatch {

// Divides the batches from `first_batch` on, after order_members() has ordered their members.
// `first_uses` is the result of order_members(). Returns the number of divided batches.
size_t chunk_batches(FlushRecord& record, size_t first_batch, FlushGraph& graph,
                     std::span<const FirstUse> first_uses);

}  // namespace autobatch

// Sorts the members of each batch in the order of their readers. The operands of the readers are
// then contiguous and need no gather.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/rules/flush_record.h"

#include <span>
#include <vector>

namespace autobatch {

// First readers of a node's results. `place` is the position in schedule order of the first reader
// that benefits from contiguous operands (Rule::copies_regions is false). `batch` is the first
// batch with any reader.
struct FirstUse {
  uint32_t place = kNone;
  uint32_t batch = kNone;
};

struct MemberOrder {
  std::vector<FirstUse> first_uses;  // indexed by node number
  size_t num_sorted = 0;             // number of reordered groups of members with one weight
};

// Reorders the members within `batches`, the schedule of `graph`. Members with the same weight stay
// together (merge_by_weight.h). If `sort` is false, the order does not change.
MemberOrder order_members(FlushGraph& graph, std::span<const BatchRecord> batches, bool sort);

}  // namespace autobatch

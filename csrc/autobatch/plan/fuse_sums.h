// Fuses each chain or tree of additions into one node. For example, `total = total + loss` over all
// instances becomes one call instead of a sequence of calls.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/plan/flush_graph.h"

namespace autobatch {

// Runs before scheduling. Replaces additions of tensors of one shape and dtype with a sum of all
// terms. The user must not hold the intermediate results, and only the additions may read these
// results. If the terms are embedding lookups in one matrix, and only the sum reads the results of
// the lookups, the lookups become part of the sum. Does not update `graph`. Returns the number of
// sums.
size_t fuse_sums(Tape& tape, const FlushGraph& graph, SignatureTable& signatures);

// The rule for a sum of terms. The operands are the terms. All terms of a node have one size.
const Rule& sum_rule();
// The rule for a sum of rows of one matrix. Like embedding_bag, the rule does not copy the rows.
const Rule& lookup_sum_rule();
// Whether results of nodes of this signature can be terms of a sum that lookup_sum_rule() computes.
bool sums_lookups(const Signature& signature);

}  // namespace autobatch

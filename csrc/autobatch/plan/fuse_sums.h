// Chains and trees of additions as one node each: `total = total + loss` over all instances is one
// call, and not one after the other.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/plan/flush_graph.h"

#include <vector>

namespace autobatch {

// Before the schedule: replaces additions of tensors of one shape and type, whose intermediate
// results nobody holds or reads otherwise, by sums of all their terms. Where the terms are rows of
// one matrix, read nowhere else, their lookups become part of the sum. The graph is not brought up
// to date. False if nothing changes.
bool collapse_sums(Tape& tape, const FlushGraph& graph, SignatureTable& signatures);

// Of terms of one size; its operands are the terms.
const Rule& sum_rule();
// Of rows looked up in one matrix, which are not copied for it: as embedding_bag.
const Rule& lookup_sum_rule();
// Whether results of this signature can be terms of the latter.
bool sums_lookups(const Signature& signature);

}  // namespace autobatch

// Lets a read compute a part of a graph while the graph stays open.
//
// If only tensors without gradients become real in a read (for example a flag), the computed nodes
// stay in the graph. The values of these nodes stay in the slabs, and the other tensors of these
// values stay pending. Nodes captured later read the values in the slabs. One FlushRecord covers
// the batches of all parts. Therefore a loop that reads a flag in each step creates no tensors for
// its other values, and backward treats all steps as one block.
//
// The first flush that cannot leave its nodes in the graph closes the record. A record without any
// gradients, as in inference, can stay open: Graph::compact drops the results that nothing refers
// to.
#pragma once

#include "autobatch/backward/backward.h"

#include <vector>

namespace autobatch {

// Whether `nodes` can be computed for `targets` while the graph stays open. `values_only`: the
// tensors of the targets may stay pending.
bool stays_open(const Graph& graph, at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> nodes,
                bool values_only);

// Whether computed results that nothing refers to may be dropped from an open record. Returns false
// if backward may run through the record later. Also returns false if a trace, a verifier or the
// report of the longest chain (plan/chain_depth.h) identifies nodes of the record by number.
bool can_be_compacted(const FlushRecord& record);

// Returns the results that are targets or bases of targets, sorted and without duplicates.
std::vector<ValueId> results_of(const Graph& graph, at::ArrayRef<ValueId> targets);

// When an open record is closed, replaces its node and value numbers with the numbers of the tape
// in `split`.
void renumber(FlushRecord& record, const Split& split);

}  // namespace autobatch

// Parts of a graph that a read computes while the graph stays open.
//
// If no tensor that becomes real has a gradient (the index of the best action, a flag), the
// computed nodes stay in the graph. Their values stay in the slabs, and tensors that stand for them
// stay pending. Nodes captured later read the values in the slabs, and one FlushRecord covers the
// batches of all parts. So the code that picks an action creates no tensors, and backward treats
// all steps as one block.
//
// The first flush that cannot leave its nodes in the graph closes the record. A record without any
// gradients, as in inference, need not be closed: results that nothing refers to any more are
// dropped from it (Graph::compact).
#pragma once

#include "autobatch/backward/backward.h"

#include <vector>

namespace autobatch {

// Whether `nodes` can be computed for `targets` with the graph left open. `values_only`: the
// targets' tensors need not become real.
bool stays_open(const Graph& graph, at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> nodes,
                bool values_only);

// Whether computed results that nothing refers to any more may be dropped from an open record. This
// requires that no backward will go through the record. It also requires that neither a trace, nor
// a verifier, nor the report of the longest chain (plan/chain_depth.h) identifies its nodes by
// number.
bool can_be_compacted(const FlushRecord& record);

// Returns the results that are targets or that targets are views of, sorted and without duplicates.
std::vector<ValueId> results_of(const Graph& graph, at::ArrayRef<ValueId> targets);

// Replaces the node and value numbers in an open record that is being closed by the numbers of the
// tape in `split`.
void renumber(FlushRecord& record, const Split& split);

}  // namespace autobatch

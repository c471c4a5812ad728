// Lets a read compute a part of a graph while the graph stays open.
//
// If a read makes only tensors without gradients real (for example a flag), the computed nodes stay
// in the graph. The values of these nodes stay in the slabs, and the other tensors of these values
// stay pending. Nodes captured later read the values in the slabs. One FlushRecord covers the
// batches of all parts. Therefore code that picks an action creates no tensors, and backward treats
// all steps as one block.
//
// The first flush that cannot leave its nodes in the graph closes the record. A record without any
// gradients, as in inference, can stay open: Graph::compact drops the results that nothing refers
// to any more.
#pragma once

#include "autobatch/backward/backward.h"

#include <vector>

namespace autobatch {

// Whether `nodes` can be computed for `targets` while the graph stays open. `values_only`: the
// targets' tensors may stay pending.
bool stays_open(const Graph& graph, at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> nodes,
                bool values_only);

// Whether computed results that nothing refers to any more may be dropped from an open record. No
// backward may go through the record later. In addition, no trace, no verifier and no report of the
// longest chain (plan/chain_depth.h) may identify the nodes of the record by number.
bool can_be_compacted(const FlushRecord& record);

// Returns the results that are targets or that targets are views of, sorted and without duplicates.
std::vector<ValueId> results_of(const Graph& graph, at::ArrayRef<ValueId> targets);

// When an open record is closed, replaces its node and value numbers with the numbers of the tape
// in `split`.
void renumber(FlushRecord& record, const Split& split);

}  // namespace autobatch

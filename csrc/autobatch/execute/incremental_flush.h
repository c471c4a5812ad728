// Parts of a graph that a read computes while the graph goes on.
//
// Where nothing that becomes real has a gradient (the index of the best action, a flag), what was
// computed stays in the graph: its values are left in their slabs, and tensors that stand for them
// stay pending. Nodes captured later read them there, and the record of the batches is one for all
// parts. So the code that picks an action costs no tensors, and backward goes over all steps as
// over one block.
//
// The record is closed by the first flush that can't be had so. Where it has no gradients at all,
// as in inference, it need not be: what nothing looks at any more is dropped from it
// (Graph::compact).
#pragma once

#include "autobatch/backward/backward.h"

#include <vector>

namespace autobatch {

// Whether the nodes can be computed for the targets, one at least, so that the graph stays open.
// `values_only`: the targets' tensors need not become real.
bool stays_open(const Graph& graph, at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> nodes,
                bool values_only);

// Whether what was computed, and nothing looks at any more, may go from an open record: no backward
// will walk it, and neither trace, verifier nor report of the longest chain know it by number.
bool can_be_compacted(const FlushRecord& record);

// The results that the targets, which have no gradients, look at.
std::vector<ValueId> results_of(const Graph& graph, at::ArrayRef<ValueId> targets);

// The numbers of an open record, which was closed and split from the graph, as those of its tape.
void renumber(FlushRecord& record, const Split& split);

}  // namespace autobatch

// Records which nodes were differentiated without retain_graph. A second backward through such a
// node raises eager's error, and the values that the node kept are freed.
#pragma once

#include "autobatch/rules/flush_record.h"

#include <vector>

namespace autobatch {

// Fills the counts of consumed nodes of a record that has just run.
void init_consumed(FlushRecord& record);

// Whether a backward pass without retain_graph that has reached the node consumes it. A shared node
// (common_subexpressions.h) stands for the nodes of several instances, and the losses of the
// instances may be differentiated one by one. So a shared node is consumed after its last reader.
bool may_consume(const FlushRecord& record, NodeId node);

// Records that a gradient was captured within the block without retain_graph, through these nodes
// (Node::spent). A shared node is spent after its last reader.
void note_captured_gradient(Graph& graph, std::vector<NodeId> nodes);

// Raises eager's error if the node keeps anything and was consumed, or was consumed before the pass
// of `task`. A shared node was consumed for an instance if it gets a gradient from a consumed
// reader. So readers are checked before the nodes that they read.
void check_not_consumed(const FlushRecord& record, NodeId node);
void check_not_consumed(const FlushRecord& record, BackwardTask& task, NodeId node);

// Records that a backward pass without retain_graph has recomputed the nodes (recompute.h).
void note_recomputed(FlushRecord& record, std::vector<NodeId> nodes);

}  // namespace autobatch

// Records which nodes were differentiated without retain_graph. The values that such a node kept
// are freed, and a second backward through the node raises the error of eager mode.
#pragma once

#include "autobatch/rules/flush_record.h"

#include <vector>

namespace autobatch {

// Fills the counts of consumed nodes of a record that has just run.
void init_consumed(FlushRecord& record);

// Whether a backward pass without retain_graph that has reached the node consumes the node. A
// shared node (common_subexpressions.h) stands for the nodes of several instances, and the losses
// of the instances may be differentiated one by one. So a shared node is consumed when its last
// reader has been consumed.
bool may_consume(const FlushRecord& record, NodeId node);

// Records that the block has captured a gradient through these nodes without retain_graph
// (Node::spent). A shared node is spent when its last reader has been spent.
void note_captured_gradient(Graph& graph, std::vector<NodeId> nodes);

// Raises the error of eager mode if the node keeps values for backward and has been consumed. The
// function with the parameter `task` raises no error if only the pass of `task` consumed the node.
// A shared node has been consumed for an instance if the node gets a gradient from a consumed
// reader. So this function must be called for the readers of a node before it is called for the
// node.
void check_not_consumed(const FlushRecord& record, NodeId node);
void check_not_consumed(const FlushRecord& record, BackwardTask& task, NodeId node);

// Records that a backward pass without retain_graph has recomputed the nodes (recompute.h).
void note_recomputed(FlushRecord& record, std::vector<NodeId> nodes);

}  // namespace autobatch

// Runs elementwise ops of a subgraph in one program, such as the gates of a cell, a block of
// members at a time. In forward, results that only the program reads have no memory. In backward,
// the gradients of results that only the program uses have no memory either. DyNet's and Cavs'
// fused cells are written by hand; here the ops are found automatically.
#pragma once

#include "autobatch/rules/flush_record.h"
#include "autobatch/subgraph/subgraph.h"

#include <optional>
#include <string>

namespace autobatch {

// Returns the node as a part of a program, or nothing if the node can't be a part of one. The
// device must have a kernel for the dtype. Operands may be broadcast only over leading dimensions.
// No gradient may be summed over the members (as for a weight).
std::optional<FusedNode> as_fused_node(const Subgraph& subgraph, NodeId node);

// Runs the program for `count` members. The slabs of results that are read outside the program must
// exist.
void run_fused(const Subgraph& subgraph, const SubgraphStep& step, const FlushRecord& record,
               int64_t count);

// Consecutive members of a batch.
struct MemberRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Adds the gradients of the program's operands, computed from the gradients of its results that
// have arrived. Gradient buffers have one row for each of `members` and no others.
void run_fused_backward(const SubgraphStep& step, FlushRecord& record, GradAccumulator& accumulator,
                        MemberRange members);

// Returns the program's name for profilers, such as
// "torch_autobatch::elementwise(aten::sigmoid, aten::mul) x 220".
std::string name_of_fused(const Tape& tape, const SubgraphStep& step, int64_t count);

}  // namespace autobatch

// Runs several elementwise ops of a subgraph, such as the gates of a cell, as one elementwise
// program (elementwise_program.h). The elementwise program processes the members block by block. In
// forward, no memory is allocated for results that only this elementwise program reads. In
// backward, no memory is allocated for the gradients of such results. The fused cells of DyNet and
// Cavs are written by hand. In this library the ops are found automatically.
#pragma once

#include "autobatch/rules/flush_record.h"
#include "autobatch/subgraph/subgraph.h"

#include <optional>
#include <string>

namespace autobatch {

// Returns the node as a part of an elementwise program, or nothing if the node cannot be such a
// part. The device must have a kernel for the dtype. Operands may be broadcast only over leading
// dimensions. No operand may have a gradient that is summed over the members, such as the gradient
// of a weight.
std::optional<FusedNode> as_fused_node(const Subgraph& subgraph, NodeId node);

// Runs the step's elementwise program for `count` members. Slabs must already exist for all results
// that are read outside the elementwise program.
void run_fused(const Subgraph& subgraph, const SubgraphStep& step, const FlushRecord& record,
               int64_t count);

// Consecutive members of a batch.
struct MemberRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Runs the backward of the step's elementwise program. The function reads the gradients of the
// results that have arrived, and adds to the gradients of the operands. A gradient buffer has
// exactly one row for each of `members`.
void run_fused_backward(const SubgraphStep& step, FlushRecord& record, GradAccumulator& accumulator,
                        MemberRange members);

// Returns the name of the step's elementwise program for profilers, such as
// "torch_autobatch::elementwise(aten::sigmoid, aten::mul) x 220".
std::string name_of_fused(const Tape& tape, const SubgraphStep& step, int64_t count);

}  // namespace autobatch

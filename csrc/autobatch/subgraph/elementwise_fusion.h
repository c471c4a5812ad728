// Elementwise ops of a subgraph in one pass: the gates of a cell, a block of members at a time.
// Forward, results that only the pass reads have no memory; backward, neither have the gradients of
// results that it alone has used. DyNet's and Cavs' fused cells are written by hand; here the chain
// is found.
#pragma once

#include "autobatch/rules/flush_record.h"
#include "autobatch/subgraph/subgraph.h"

#include <optional>
#include <string>

namespace autobatch {

// The node as a part of a pass, if it can be one: float or double on a CPU, operands that are
// broadcast over leading dimensions at most, no gradient summed over the members (of a weight).
std::optional<ChainNode> as_chain_node(const Subgraph& subgraph, NodeId node);

// Runs the chain for `count` members. Slabs of results that others read are there.
void run_chain(const Subgraph& subgraph, const SubgraphStep& step, const FlushRecord& record,
               int64_t count);

// Members of a batch that follow each other.
struct MemberRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Adds the gradients of its operands, from those of its results that have come. Gradients have a
// row for each of these members alone.
void run_chain_backward(const SubgraphStep& step, FlushRecord& record, GradAccumulator& accumulator,
                        MemberRange members);

// For profilers: "torch_autobatch::elementwise(aten::sigmoid, aten::mul) x 220".
std::string name_of_chain(const Tape& tape, const SubgraphStep& step, int64_t count);

}  // namespace autobatch

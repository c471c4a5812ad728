// Subgraphs: a cell's ops as one node. A batch of n uses runs each op of the subgraph once, on all
// n: all uses are of the same shapes, so that the values of an op lie evenly spaced in one buffer,
// and what is known of one member is known of all. Nothing is listed for each member, as it is for
// the nodes of a graph, and nothing is gathered but the cell's inputs.
//
// A subgraph is a tape of one member. A batch runs it with the rules of its ops as a flush of its
// own: the cell's inputs, stacked, and the weights are the graph inputs.
#pragma once

#include "autobatch/rules/rule.h"

#include <array>
#include <memory>
#include <vector>

namespace autobatch {

// An elementwise op of a subgraph as a step of a pass (fused_elementwise.h): the loops over one
// member's elements, and how far each tensor's runs are apart: the result's and the operands'.
struct ChainNode {
  NodeId node = kNone;
  PointwiseOp op;
  int64_t mid = 1, inner = 1;
  std::array<int64_t, 3> run{};
};

// What a pass adds to columns of a product before it reads that: its bias.
struct ChainAddend {
  ValueId product = kNone, addend = kNone;
  Rule::Addend where;
};

// What a subgraph does at a time: one node with its rule, or elementwise ones in one pass.
struct SubgraphStep {
  NodeId node = kNone;
  std::vector<ChainNode> chain;  // else
  std::vector<ChainAddend> addends;

  template <class Visit>
  void each_node(const Visit& visit) const {
    if (chain.empty()) visit(node);
    for (const ChainNode& part : chain) visit(part.node);
  }
};

struct Subgraph {
  Tape tape;  // of one member; graph input i is the cell's operand i, without data
  // As the cell's ops were captured, the same values by the same numbers, where `tape` has others
  // in the place of some (fuse_shared_input_linear.h); else empty.
  Tape captured;
  std::vector<std::shared_ptr<Signature>> joined;  // of those
  std::vector<uint8_t> is_weight;                  // by operand: one tensor for all members
  std::vector<ValueId> results;                    // of the cell, as values of the tape

  // What follows from these (complete()).
  std::vector<SubgraphStep> steps;  // in the order they are run
  Store store;  // where one member's values lie: a slab for each result of an op
  std::vector<uint8_t> leaves_addends;  // by node: a step's pass adds them
  std::vector<uint8_t> passing;         // by slab: one chain alone uses it, so that there is none
  std::vector<std::vector<uint32_t>> drop_after;  // by step: slabs that nobody reads later
  std::vector<uint8_t> slab_saved;                // by slab: some backward reads it
  // By slab: it, or its gradient, is a factor of a weight's gradient (factor_buffers.h).
  std::vector<uint8_t> is_factor, is_grad_factor;
  std::vector<uint8_t> operand_saved;  // by operand: likewise
  std::vector<uint8_t> is_copied;      // by operand: read by rules alone that copy its regions
  std::vector<uint64_t> depends;  // by result of the cell: bit i: its gradient goes to operand i
  std::vector<uint8_t> feeds;     // by result: another one is computed from it
  std::vector<uint8_t> closure;   // by result: bit j: its gradient goes to result j, or is that
  bool heavy = false;
  bool saves = false;   // some op's backward reads a value
  Partition partition;  // of the values that gradients go to

  void complete();
  // The ops as eager has them.
  const Tape& ops() const { return captured.nodes.empty() ? tape : captured; }
};

// At most so many operands and results: there is a bit for each.
inline constexpr size_t kMostOperands = 32;
inline constexpr size_t kMostResults = 7;

std::shared_ptr<const Rule> make_subgraph_rule(Subgraph subgraph);

// Puts the ops of subgraphs in their nodes' place, where the user holds a result that another one
// is computed from: the gradient of that must pass through it, as eager's does. `record`: of what
// was computed before, by the split's numbers.
void unfold_held_subgraphs(Split& split, FlushRecord& record);
// Whether that would be done to this node.
bool must_unfold(const Tape& tape, NodeId node);

}  // namespace autobatch

// Subgraphs: the ops of a cell as one node. A batch of n calls of the cell runs each op of the
// subgraph once, for all n members. All calls have the same shapes, so the values of an op are
// evenly spaced in one buffer, and properties of one member hold for all members. Unlike for the
// nodes of a graph, nothing is listed for each member, and only the cell's inputs are gathered.
//
// A subgraph is a tape of one member. A batch runs the tape with the rules of its ops, like a flush
// of its own. Its graph inputs are the cell's inputs, stacked, and the weights.
#pragma once

#include "autobatch/rules/rule.h"

#include <array>
#include <memory>
#include <vector>

namespace autobatch {

// An elementwise op of a subgraph as a step of a program (elementwise_program.h). `mid`, `inner`:
// the loops over one member's elements. `run`: elements from one run to the next, of the result and
// then of the operands.
struct FusedNode {
  NodeId node = kNone;
  ElementwiseOp op;
  int64_t mid = 1, inner = 1;
  std::array<int64_t, 3> run{};
};

// A vector that a program adds to columns of a product before it reads the product: its bias.
struct FusedAddend {
  ValueId product = kNone, addend = kNone;
  Rule::Addend where;
};

// One step of a subgraph: one node with its rule, or several elementwise nodes in one program.
struct SubgraphStep {
  NodeId node = kNone;
  std::vector<FusedNode> fused;  // of a program; empty: the step is `node`
  std::vector<FusedAddend> addends;

  template <class Visit>
  void each_node(const Visit& visit) const {
    if (fused.empty()) visit(node);
    for (const FusedNode& part : fused) visit(part.node);
  }
};

struct Subgraph {
  Tape tape;  // of one member; graph input i is the cell's operand i, without data
  // The tape as the cell's ops were captured, if `tape` has other ops in the place of some of them
  // (fuse_shared_input_linear.h); else empty. Values in both tapes have the same numbers.
  Tape captured;
  std::vector<std::shared_ptr<Signature>> joined;  // owns the signatures of the replacing ops
  std::vector<uint8_t> is_weight;                  // by operand: one tensor for all members
  std::vector<ValueId> results;                    // of the cell, as values of the tape

  // Computed from the fields above by complete().
  std::vector<SubgraphStep> steps;  // in execution order
  Store store;  // places of one member's values: a slab for each result of an op
  std::vector<uint8_t> leaves_addends;  // by node: a program adds its addends (Rule::addends)
  std::vector<uint8_t> passing;         // by slab: only one program uses it, so it has no memory
  std::vector<std::vector<uint32_t>> drop_after;  // by step: slabs that no later step reads
  std::vector<uint8_t> slab_saved;                // by slab: the backward of some op reads it
  // By slab: whether the slab, or its gradient, is a factor of a weight's gradient
  // (factor_buffers.h).
  std::vector<uint8_t> is_factor, is_grad_factor;
  std::vector<uint8_t> operand_saved;  // by operand: the backward of some op reads it
  std::vector<uint8_t> is_copied;      // by operand: only rules that copy its regions read it
  std::vector<uint64_t> depends;  // by result of the cell: bit i: its gradient goes to operand i
  std::vector<uint8_t> feeds;     // by result: another result is computed from it
  std::vector<uint8_t> closure;   // by result k: bit j: its gradient goes to result j, or j == k
  bool heavy = false;
  bool saves = false;   // some op keeps values for backward
  Partition partition;  // of the values that gradients go to

  void complete();
  // Returns the ops as eager runs them.
  const Tape& ops() const { return captured.nodes.empty() ? tape : captured; }
};

// Maximum numbers of operands and results: bit sets have a bit for each.
inline constexpr size_t kMostOperands = 32;
inline constexpr size_t kMostResults = 7;

std::shared_ptr<const Rule> make_subgraph_rule(Subgraph subgraph);

// Replaces nodes of subgraphs by their ops, where the user holds a result that another result is
// computed from. The gradient of the other result must pass through the held one, as in eager.
// `record`: results that were computed before. The numbers of the split's nodes and values in the
// record are updated.
void unfold_held_subgraphs(Split& split, FlushRecord& record);
// Whether unfold_held_subgraphs() would replace this node.
bool must_unfold(const Tape& tape, NodeId node);

}  // namespace autobatch

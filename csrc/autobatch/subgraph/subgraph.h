// A subgraph is one node that contains the ops of a cell. A batch of n calls of the cell runs each
// op of the subgraph once, for all n members. All calls have the same shapes. Therefore the values
// of an op are evenly spaced in one buffer, and the properties of one member hold for all members.
// So a subgraph needs no list with an entry for each member. Only the cell's inputs are gathered.
//
// A subgraph is stored as the tape of one member. A batch runs this tape with the rules of its ops,
// like a small flush. The graph inputs of the tape are the stacked inputs of the cell, and the
// weights.
#pragma once

#include "autobatch/rules/rule.h"

#include <array>
#include <memory>
#include <vector>

namespace autobatch {

// An elementwise op of a subgraph as a step of an elementwise program (elementwise_program.h).
// `mid` and `inner` are the lengths of the loops over one member's elements. `run` contains the
// distance, in elements, from one run of the inner loop to the next. The first entry is for the
// result, and the other entries are for the operands.
struct FusedNode {
  NodeId node = kNone;
  ElementwiseOp op;
  int64_t mid = 1, inner = 1;
  std::array<int64_t, 3> run{};
};

// The bias of a matrix product. The elementwise program that reads the product first adds the bias,
// a vector, to columns of the product.
struct FusedAddend {
  ValueId product = kNone, addend = kNone;
  Rule::Addend where;
};

// One step of a subgraph. A step runs one node by its rule, or several elementwise nodes as one
// elementwise program.
struct SubgraphStep {
  NodeId node = kNone;
  std::vector<FusedNode> fused;  // the nodes of a program, or empty if the step is `node`
  std::vector<FusedAddend> addends;

  template <class Visit>
  void each_node(const Visit& visit) const {
    if (fused.empty()) visit(node);
    for (const FusedNode& part : fused) visit(part.node);
  }
};

struct Subgraph {
  Tape tape;  // the tape of one member; graph input i is operand i, without data
  // In `tape`, fused ops may replace some of the captured ops (fuse_shared_input_linear.h). If so,
  // `captured` is the tape with the captured ops. Otherwise `captured` is empty. A value has the
  // same number in both tapes.
  Tape captured;
  std::vector<std::shared_ptr<Signature>> joined;  // signatures of the fused ops
  std::vector<uint8_t> is_weight;                  // for each operand: whether all members share it
  std::vector<ValueId> results;                    // the cell's results, as values of the tape

  // Computed from the fields above by complete().
  std::vector<SubgraphStep> steps;  // in execution order
  Store store;                      // places of one member's values; each op result has a slab
  // For each node: whether a later step adds the node's addends (Rule::addends).
  std::vector<uint8_t> leaves_addends;
  // For each slab: whether only one fused step uses the slab. Such a slab has no memory.
  std::vector<uint8_t> passing;
  std::vector<std::vector<uint32_t>> drop_after;  // for each step: slabs that no later step reads
  std::vector<uint8_t> slab_saved;                // for each slab: whether a backward reads it
  // For each slab: whether the slab is a factor of a weight's gradient (factor_buffers.h), and
  // whether the gradient of the slab is such a factor.
  std::vector<uint8_t> is_factor, is_grad_factor;
  std::vector<uint8_t> operand_saved;  // for each operand: whether the backward of an op reads it
  // For each operand: whether all rules that read the operand copy its regions.
  std::vector<uint8_t> is_copied;
  // For each result of the cell: bit i is set if the result's gradient flows to operand i.
  std::vector<uint64_t> depends;
  // For each result of the cell: whether another result depends on it.
  std::vector<uint8_t> feeds;
  // For each result k of the cell: bit j is set if the gradient of result k flows to result j, or
  // if j == k.
  std::vector<uint8_t> closure;
  bool heavy = false;
  bool saves = false;   // whether an op keeps values for backward
  Partition partition;  // the partition of the values that receive gradients

  void complete();
  // Returns the tape with the ops that eager mode runs.
  const Tape& ops() const { return captured.nodes.empty() ? tape : captured; }
};

// Maximum numbers of operands and results. The numbers are limited because bit sets have one bit
// for each operand or result.
inline constexpr size_t kMostOperands = 32;
inline constexpr size_t kMostResults = 7;

std::shared_ptr<const Rule> make_subgraph_rule(Subgraph subgraph);

// Replaces a subgraph's node with the ops of the subgraph if the user holds a result from which
// another result is computed. As in eager mode, the gradient of the other result must pass through
// the result that the user holds. `record` contains the results that are already computed. The
// function updates the numbers of the split's nodes and values in the record.
void unfold_held_subgraphs(Split& split, FlushRecord& record);
// Whether unfold_held_subgraphs() would replace this node.
bool must_unfold(const Tape& tape, NodeId node);

}  // namespace autobatch

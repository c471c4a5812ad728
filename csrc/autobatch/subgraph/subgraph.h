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
// distance, in elements, from one run to the next: first for the result, then for the operands.
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
  std::vector<FusedNode> fused;  // the nodes of a program; empty: the step is `node`
  std::vector<FusedAddend> addends;

  template <class Visit>
  void each_node(const Visit& visit) const {
    if (fused.empty()) visit(node);
    for (const FusedNode& part : fused) visit(part.node);
  }
};

struct Subgraph {
  Tape tape;  // the tape of one member; graph input i is operand i, without data
  // In `tape` some captured ops may be replaced by others (fuse_shared_input_linear.h). In this
  // case `captured` is the tape with the original ops; otherwise it is empty. A value has the same
  // number in both tapes.
  Tape captured;
  std::vector<std::shared_ptr<Signature>> joined;  // signatures of the replacing ops
  std::vector<uint8_t> is_weight;                  // by operand: whether all members share it
  std::vector<ValueId> results;                    // the cell's results, as values of the tape

  // Computed from the fields above by complete().
  std::vector<SubgraphStep> steps;      // in execution order
  Store store;                          // places of one member's values; each op result has a slab
  std::vector<uint8_t> leaves_addends;  // by node: a later step adds its addends (Rule::addends)
  std::vector<uint8_t> passing;         // by slab: no memory, only one fused step uses it
  std::vector<std::vector<uint32_t>> drop_after;  // by step: slabs that no later step reads
  std::vector<uint8_t> slab_saved;                // by slab: the backward of some op reads it
  // By slab: whether the slab is a factor of a weight's gradient (factor_buffers.h), and whether
  // the gradient of the slab is such a factor.
  std::vector<uint8_t> is_factor, is_grad_factor;
  std::vector<uint8_t> operand_saved;  // by operand: the backward of some op reads it
  std::vector<uint8_t> is_copied;      // by operand: all rules that read it copy its regions
  std::vector<uint64_t> depends;  // by result of the cell; bit i: operand i receives its gradient
  std::vector<uint8_t> feeds;     // by result: whether another result depends on it
  std::vector<uint8_t> closure;   // by result k; bit j: result j receives its gradient, or j == k
  bool heavy = false;
  bool saves = false;   // an op keeps values for backward
  Partition partition;  // of the values that receive gradients

  void complete();
  // Returns the tape with the ops that eager runs.
  const Tape& ops() const { return captured.nodes.empty() ? tape : captured; }
};

// Maximum numbers of operands and results. The numbers are limited because bit sets have one bit
// for each operand or result.
inline constexpr size_t kMostOperands = 32;
inline constexpr size_t kMostResults = 7;

std::shared_ptr<const Rule> make_subgraph_rule(Subgraph subgraph);

// Replaces a subgraph's node with the ops of the subgraph if the user holds a result from which
// another result is computed. As in eager, the gradient of the other result must pass through the
// result that the user holds. `record` contains the results that are already computed. The function
// updates the numbers of the split's nodes and values in the record.
void unfold_held_subgraphs(Split& split, FlushRecord& record);
// Whether unfold_held_subgraphs() would replace this node.
bool must_unfold(const Tape& tape, NodeId node);

}  // namespace autobatch

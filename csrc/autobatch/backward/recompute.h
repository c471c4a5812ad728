// Backward with create_graph=True, or in a transform (vmap over autograd.grad): what a held value
// was computed from is computed once more, eagerly and op by op, under autograd, and that graph is
// differentiated. Slow next to the batched backward, but its result can be differentiated again, as
// often as one likes.
#pragma once

#include "autobatch/backward/backward.h"

#include <torch/csrc/autograd/edge.h>

#include <unordered_map>
#include <vector>

namespace autobatch {

class Recompute {
 public:
  // Where gradients go: by graph input, and by held value that cuts the graph.
  struct Edges {
    std::unordered_map<uint32_t, torch::autograd::Edge> graph_inputs;
    std::unordered_map<ValueId, torch::autograd::Edge> cuts;
  };

  Recompute(FlushRecord& record, const std::vector<UnseenWrite>& unseen)
      : record_(record), unseen_(unseen) {}

  // Adds the gradients that flow from `gradient`, of the value `held`, to the graph inputs and
  // to the held values next on the way; both as tensors with a graph.
  void differentiate(ValueId held, const at::Tensor& gradient, const Edges& edges);

  // By graph input, and by held value: collected so far; taken once.
  at::Tensor take_graph_input(uint32_t index) { return take(graph_input_grads_, index); }
  at::Tensor take_cut(ValueId held) { return take(cut_grads_, held); }

  // The nodes that were replayed.
  const std::vector<NodeId>& nodes() const { return replayed_; }

 private:
  using Gradients = std::unordered_map<uint32_t, at::Tensor>;
  static at::Tensor take(Gradients& gradients, uint32_t key);
  static void add(Gradients& gradients, uint32_t key, const at::Tensor& gradient);

  at::Tensor read(ValueId id);               // as an operand: cut at held values
  at::Tensor read(ValueId id, ValueId cut);  // cut there, or not at all
  at::Tensor find(ValueId id, ValueId cut);
  at::Tensor graph_input(uint32_t index);
  at::Tensor held(ValueId id);
  at::Tensor result(ValueId id);
  at::Tensor blank_apart(ValueId id);
  at::Tensor computed(ValueId id) const;  // what forward left; of any values, if that is freed
  // A node's operands, and those that hold what eager saved only once the node has run.
  struct Operands {
    void restore_last(const at::Tensor& as_read);  // in memory of its own
    void overwrite_saved() const;

    std::vector<at::Tensor> tensors;
    std::vector<std::pair<at::Tensor, at::Tensor>> saved;  // an operand, and what it is to hold
  };
  Operands read_operands(NodeId node);
  void overwrite_saved_results(NodeId node, const std::vector<at::Tensor>& results) const;
  void run(NodeId node);
  void check_recomputed(NodeId node, const std::vector<at::Tensor>& results) const;
  void forget_constants();

  FlushRecord& record_;
  const std::vector<UnseenWrite>& unseen_;
  const Edges* edges_ = nullptr;
  // Aliases, so that differentiation stops at them and their graph goes on behind them.
  std::unordered_map<uint32_t, at::Tensor> graph_input_;
  std::unordered_map<ValueId, at::Tensor> cuts_;
  std::unordered_map<ValueId, at::Tensor> results_;
  // What was read as a constant, for nothing that was differentiated so far depends on it: another
  // result of the same node may.
  std::vector<uint32_t> constant_graph_input_;
  std::vector<ValueId> constant_cuts_;
  std::vector<NodeId> replayed_;
  std::vector<uint8_t> is_replayed_;  // by node
  Gradients graph_input_grads_, cut_grads_;
};

}  // namespace autobatch

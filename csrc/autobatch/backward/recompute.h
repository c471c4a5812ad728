// Runs backward with create_graph=True, or in a transform (vmap over autograd.grad). The nodes that
// a held value depends on run again under autograd, eagerly and one by one. Gradients are computed
// through the resulting graph. This backward is slower than batched backward, but it supports
// derivatives of any order.
#pragma once

#include "autobatch/backward/backward.h"

#include <torch/csrc/autograd/edge.h>

#include <unordered_map>
#include <vector>

namespace autobatch {

class Recompute {
 public:
  // The gradient edges of graph inputs, and of the held values at which differentiation stops
  // (cuts).
  struct Edges {
    std::unordered_map<uint32_t, torch::autograd::Edge> graph_inputs;
    std::unordered_map<ValueId, torch::autograd::Edge> cuts;
  };

  Recompute(FlushRecord& record, const std::vector<UnseenWrite>& unseen)
      : record_(record), unseen_(unseen) {}

  // Adds the gradient of a held value. `edges`: the edges of the graph inputs and held values to
  // which this gradient may flow.
  void add_root(ValueId held, const at::Tensor& gradient, const Edges& edges);
  // From the gradients that were added since the last call, computes the gradients of graph inputs
  // and of cuts (Edges). Adds the results to the collected gradients. The gradients have an
  // autograd graph if grad mode is on. All roots are differentiated together, because the backward
  // of a custom autograd.Function may be nonlinear and must run only once. Returns false if there
  // is no root.
  bool differentiate();

  // Returns the gradient collected so far for a graph input or a held value, and removes this
  // gradient from the collected gradients. Returns an undefined tensor if there is no gradient.
  at::Tensor take_graph_input(uint32_t index) { return take(graph_input_grads_, index); }
  at::Tensor take_cut(ValueId held) { return take(cut_grads_, held); }

  // The nodes that were computed again.
  const std::vector<NodeId>& nodes() const { return replayed_; }

 private:
  using Gradients = std::unordered_map<uint32_t, at::Tensor>;
  static at::Tensor take(Gradients& gradients, uint32_t key);
  static void add(Gradients& gradients, uint32_t key, const at::Tensor& gradient);

  // Returns the recomputed value `id`. If `id` is a held value or a view of a held value, reads the
  // alias of the nearest held value.
  at::Tensor read(ValueId id);
  // Like read(id), but reads the alias of the held value `cut`. If `cut` is kNone, reads no alias
  // of a held value.
  at::Tensor read(ValueId id, ValueId cut);
  at::Tensor find(ValueId id, ValueId cut);
  at::Tensor graph_input(uint32_t index);
  at::Tensor held(ValueId id);
  bool is_known(ValueId id);
  at::Tensor result(ValueId id);
  at::Tensor blank_without_overlap(ValueId id);
  // Returns the value that forward computed, or zeros of the same geometry if the value was freed.
  at::Tensor computed(ValueId id) const;
  // The operands of a node. Saved operands may get other content after the node has run, so that
  // formulas read the content that they would read in eager mode.
  struct Operands {
    // Replaces the last operand with a copy that has the content `as_read`.
    void restore_last(const at::Tensor& as_read);
    void overwrite_saved() const;

    std::vector<at::Tensor> tensors;
    // Pairs of a saved operand and the content that it gets after the node has run.
    std::vector<std::pair<at::Tensor, at::Tensor>> saved;
  };
  Operands read_operands(NodeId node);
  void overwrite_saved_results(NodeId node, const std::vector<at::Tensor>& results) const;
  void run(NodeId node);
  void check_recomputed(NodeId node, const std::vector<at::Tensor>& results) const;
  void forget_constants();

  FlushRecord& record_;
  const std::vector<UnseenWrite>& unseen_;
  struct Root {
    ValueId held;
    at::Tensor gradient;
  };
  std::vector<Root> roots_;
  Edges edges_;  // the edges of all roots that were added
  // Aliases of graph inputs and held values. Differentiation stops at an alias, and the alias's
  // grad_fn connects the result to the graph of the original tensor.
  std::unordered_map<uint32_t, at::Tensor> graph_input_;
  std::unordered_map<ValueId, at::Tensor> cuts_;
  std::unordered_map<ValueId, at::Tensor> results_;
  // Graph inputs and held values that were read as constants, because no root so far depends on
  // these values. A later root may depend on these values (forget_constants).
  std::vector<uint32_t> constant_graph_input_;
  std::vector<ValueId> constant_cuts_;
  std::vector<NodeId> replayed_;
  std::vector<uint8_t> is_replayed_;  // for each node: whether it was computed again
  Gradients graph_input_grads_, cut_grads_;
};

}  // namespace autobatch

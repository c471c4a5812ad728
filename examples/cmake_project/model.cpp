#include "model.h"

#include <torch/types.h>

TreeLstmImpl::TreeLstmImpl(int64_t words, int64_t hidden, int64_t labels)
    : embedding_(register_module("embedding", torch::nn::Embedding(words, hidden))),
      leaf_(register_module("leaf", torch::nn::Linear(hidden, 3 * hidden))),
      node_(register_module("node", torch::nn::Linear(2 * hidden, 5 * hidden))),
      output_(register_module("output", torch::nn::Linear(hidden, labels))),
      compose_cell_(autobatch::cell(
          [this](const State& left, const State& right) { return compose(left, right); },
          "TreeLstm::compose")) {}

TreeLstmImpl::State TreeLstmImpl::compose(const State& left, const State& right) {
  const auto gates = node_(torch::cat({left.first, right.first}, 1)).chunk(5, 1);
  const auto c = torch::sigmoid(gates[0]) * torch::tanh(gates[1]) +
                 torch::sigmoid(gates[2]) * left.second + torch::sigmoid(gates[3]) * right.second;
  return {torch::sigmoid(gates[4]) * torch::tanh(c), c};
}

TreeLstmImpl::State TreeLstmImpl::encode(const Tree& tree, std::vector<torch::Tensor>& losses) {
  State state;
  if (tree.is_leaf()) {
    const auto gates = leaf_(embedding_(torch::tensor({tree.word}))).chunk(3, 1);
    const auto c = torch::sigmoid(gates[0]) * torch::tanh(gates[1]);
    state = {torch::sigmoid(gates[2]) * torch::tanh(c), c};
  } else {
    const State left = encode(*tree.left, losses), right = encode(*tree.right, losses);
    state = compose_cell_(left, right);
  }
  losses.push_back(torch::cross_entropy_loss(output_(state.first), torch::tensor({tree.label})));
  return state;
}

torch::Tensor TreeLstmImpl::loss(const Tree& tree) {
  std::vector<torch::Tensor> losses;
  encode(tree, losses);
  torch::Tensor total = losses.front();
  for (size_t i = 1; i < losses.size(); ++i) total = total + losses[i];
  return total;
}

int64_t TreeLstmImpl::label(const Tree& tree) {
  std::vector<torch::Tensor> losses;
  return output_(encode(tree, losses).first).argmax(1).item<int64_t>();
}

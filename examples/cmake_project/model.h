// A binary Tree-LSTM (Tai, Socher, Manning 2015, section 3.2) that labels every node of one tree.
#pragma once

#include "treebank.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <autobatch/autobatch.h>

#include <functional>
#include <utility>
#include <vector>

class TreeLstmImpl : public torch::nn::Module {
 public:
  using State = std::pair<torch::Tensor, torch::Tensor>;  // h and c, [1, hidden] each

  TreeLstmImpl(int64_t words, int64_t hidden, int64_t labels);

  // Returns the loss of one tree, summed over its nodes. The model has no code for minibatches.
  torch::Tensor loss(const Tree& tree);
  // Returns the predicted label of the root.
  int64_t label(const Tree& tree);

 private:
  State encode(const Tree& tree, std::vector<torch::Tensor>& losses);
  State compose(const State& left, const State& right);

  torch::nn::Embedding embedding_;
  torch::nn::Linear leaf_, node_, output_;
  // compose() as a cell. It is captured once. For each further node its ops are added without
  // running it.
  std::function<State(const State&, const State&)> compose_cell_;
};

TORCH_MODULE(TreeLstm);

// A model in two forms: written for one example, and batched by hand. Both have the same parameters
// and losses.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

namespace benchmarks {

class Workload {
 public:
  virtual ~Workload() = default;
  virtual std::string name() const = 0;
  virtual std::vector<at::Tensor> parameters() const = 0;
  // Returns the loss of one example of minibatch k. `cells`: whether the repeated part is an
  // autobatch::cell.
  virtual at::Tensor loss(size_t k, size_t example, bool cells) = 0;
  // Returns the sum of the losses of all examples of minibatch k.
  virtual at::Tensor loss_by_hand(size_t k) = 0;
};

inline constexpr size_t kMinibatch = 64, kMinibatches = 4;
inline constexpr int64_t kVocabulary = 1000, kEmbedding = 128;

// A binary Tree-LSTM on random trees of 5 to 40 leaves, with a loss at each node. `fused`: one
// matrix product for all gates instead of one per gate.
std::unique_ptr<Workload> make_tree_lstm(int64_t hidden, bool fused);

// A BiLSTM tagger that runs word by word, on random sentences of 5 to 40 words.
std::unique_ptr<Workload> make_bilstm(int64_t hidden);

// Returns the ids 0 to count - 1 in the form that models take: a tensor of shape [1] for each id.
std::vector<at::Tensor> ids(int64_t count);
// Returns a 1-D tensor of dtype int64.
at::Tensor as_tensor(const std::vector<int64_t>& values);

}  // namespace benchmarks

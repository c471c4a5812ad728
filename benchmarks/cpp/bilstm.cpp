#include "workload.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <autobatch/autobatch.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>

namespace benchmarks {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using State = std::tuple<Tensor, Tensor>;

constexpr int64_t kTags = 9, kTaggerHidden = 32;

struct Sentence {
  std::vector<int64_t> words, tags;
};

// Sentences in the layout of PackedSequence: step by step, the longest sentence first.
struct Plan {
  Tensor words, tags;
  std::vector<int64_t> batch_sizes;
};

Plan plan_of(const std::vector<Sentence>& sentences) {
  std::vector<size_t> order(sentences.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return sentences[a].words.size() > sentences[b].words.size();
  });
  Plan plan;
  std::vector<int64_t> words, tags;
  for (size_t step = 0; step < sentences[order[0]].words.size(); ++step) {
    const size_t before = words.size();
    for (const size_t s : order) {
      if (step >= sentences[s].words.size()) break;
      words.push_back(sentences[s].words[step]);
      tags.push_back(sentences[s].tags[step]);
    }
    plan.batch_sizes.push_back(static_cast<int64_t>(words.size() - before));
  }
  plan.words = as_tensor(words);
  plan.tags = as_tensor(tags);
  return plan;
}

// Returns the hidden states in the layout of the inputs. On one thread this is faster than nn.LSTM
// on a PackedSequence. (At each step, the backward of nn.LSTM fills a tensor that is as large as
// all steps.)
Tensor run_by_hand(torch::nn::LSTMCell& cell, const Tensor& inputs,
                   const std::vector<int64_t>& batch_sizes, bool reverse) {
  const int64_t hidden = cell->weight_hh.size(1);
  const Tensor all = at::linear(inputs, cell->weight_ih, cell->bias_ih + cell->bias_hh);
  const Tensors gates = all.split_with_sizes(batch_sizes);
  const Tensor recurrent = cell->weight_hh.t();
  Tensor h, c;
  Tensors states(gates.size());
  for (size_t i = 0; i < gates.size(); ++i) {
    const size_t step = reverse ? gates.size() - 1 - i : i;
    const int64_t size = gates[step].size(0), before = h.defined() ? h.size(0) : 0;
    if (before > size) h = h.narrow(0, 0, size), c = c.narrow(0, 0, size);
    if (before > 0 && before < size) {  // in the reverse direction, shorter sentences begin later
      h = at::constant_pad_nd(h, {0, 0, 0, size - before});
      c = at::constant_pad_nd(c, {0, 0, 0, size - before});
    }
    const Tensor sum = before > 0 ? at::addmm(gates[step], h, recurrent) : gates[step];
    const Tensors parts = sum.split_with_sizes({2 * hidden, hidden, hidden}, 1);
    const Tensors both = at::sigmoid(parts[0]).chunk(2, 1);
    const Tensor written = both[0] * at::tanh(parts[1]);
    c = before > 0 ? at::addcmul(written, both[1], c) : written;
    h = at::sigmoid(parts[2]) * at::tanh(c);
    states[step] = h;
  }
  return at::cat(states);
}

class BiLstm final : public Workload {
 public:
  explicit BiLstm(int64_t hidden)
      : hidden_(hidden),
        embedding_(kVocabulary, kEmbedding),
        forward_(kEmbedding, hidden),
        backward_(kEmbedding, hidden),
        inner_(2 * hidden, kTaggerHidden),
        output_(kTaggerHidden, kTags),
        words_(ids(kVocabulary)),
        tags_(ids(kTags)),
        tag_cell_(autobatch::cell([this](const Tensor& left, const Tensor& right,
                                         const Tensor& tag) { return tag_loss(left, right, tag); },
                                  "tag_loss")) {
    std::mt19937 draw(1);
    const auto below = [&](int64_t n) {
      return std::uniform_int_distribution<int64_t>(0, n - 1)(draw);
    };
    for (size_t k = 0; k < kMinibatches; ++k) {
      auto& sentences = minibatches_.emplace_back();
      for (size_t i = 0; i < kMinibatch; ++i) {
        Sentence& sentence = sentences.emplace_back();
        for (int64_t length = 5 + below(36); length > 0; --length) {
          sentence.words.push_back(below(kVocabulary));
          sentence.tags.push_back(below(kTags));
        }
      }
      plans_.push_back(plan_of(sentences));
    }
  }

  std::string name() const override { return "BiLSTM " + std::to_string(hidden_); }

  Tensors parameters() const override {
    Tensors all;
    const auto add = [&](const auto& module) {
      for (const Tensor& p : module->parameters()) all.push_back(p);
    };
    add(embedding_), add(forward_), add(backward_), add(inner_), add(output_);
    return all;
  }

  Tensor loss(size_t k, size_t example, bool cells) override {
    const Sentence& sentence = minibatches_[k][example];
    Tensors words;
    for (const int64_t word : sentence.words)
      words.push_back(embedding_(words_[static_cast<size_t>(word)]));
    const Tensors left = run(forward_, words);
    std::reverse(words.begin(), words.end());
    Tensors right = run(backward_, words);
    std::reverse(right.begin(), right.end());
    Tensor total;
    for (size_t i = 0; i < left.size(); ++i) {
      const Tensor& tag = tags_[static_cast<size_t>(sentence.tags[i])];
      const Tensor loss =
          cells ? tag_cell_(left[i], right[i], tag) : tag_loss(left[i], right[i], tag);
      total = total.defined() ? total + loss : loss;
    }
    return total;
  }

  Tensor loss_by_hand(size_t k) override {
    const Plan& plan = plans_[k];
    const Tensor words = embedding_(plan.words);
    const Tensor left = run_by_hand(forward_, words, plan.batch_sizes, false);
    const Tensor right = run_by_hand(backward_, words, plan.batch_sizes, true);
    const Tensor scores = output_(at::tanh(inner_(at::cat({left, right}, 1))));
    return at::cross_entropy_loss(scores, plan.tags, {}, at::Reduction::Sum);
  }

 private:
  static Tensors run(torch::nn::LSTMCell& cell, const Tensors& inputs) {
    Tensors hidden;
    State state;
    for (const Tensor& x : inputs) {
      state = hidden.empty() ? cell(x) : cell(x, state);
      hidden.push_back(std::get<0>(state));
    }
    return hidden;
  }

  Tensor tag_loss(const Tensor& left, const Tensor& right, const Tensor& tag) {
    const Tensor scores = output_(at::tanh(inner_(at::cat({left, right}, 1))));
    return at::cross_entropy_loss(scores, tag);
  }

  int64_t hidden_;
  torch::nn::Embedding embedding_;
  torch::nn::LSTMCell forward_, backward_;
  torch::nn::Linear inner_, output_;
  Tensors words_, tags_;
  std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)> tag_cell_;
  std::vector<std::vector<Sentence>> minibatches_;
  std::vector<Plan> plans_;
};

}  // namespace

std::unique_ptr<Workload> make_bilstm(int64_t hidden) { return std::make_unique<BiLstm>(hidden); }

}  // namespace benchmarks

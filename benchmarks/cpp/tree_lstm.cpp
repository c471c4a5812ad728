#include "workload.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <autobatch/autobatch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

namespace benchmarks {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using State = std::pair<Tensor, Tensor>;  // h and c

constexpr int64_t kLabels = 5;

struct Node {
  int64_t word = 0, label = 0;
  int left = -1, right = -1;  // indices of earlier nodes; -1 for a leaf
  int depth = 0;              // distance from the root
};
using Tree = std::vector<Node>;  // children before parents

Tree random_tree(std::mt19937& draw) {
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(draw);
  };
  Tree tree;
  std::vector<int> roots;
  for (int64_t leaf = 5 + below(36); leaf > 0; --leaf) {
    roots.push_back(static_cast<int>(tree.size()));
    tree.push_back({below(kVocabulary), below(kLabels)});
  }
  while (roots.size() > 1) {
    const auto i = static_cast<size_t>(below(static_cast<int64_t>(roots.size()) - 1));
    tree.push_back({0, below(kLabels), roots[i], roots[i + 1]});
    roots[i] = static_cast<int>(tree.size()) - 1;
    roots.erase(roots.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  }
  for (auto node = tree.rbegin(); node != tree.rend(); ++node) {
    if (node->left < 0) continue;
    tree[static_cast<size_t>(node->left)].depth = node->depth + 1;
    tree[static_cast<size_t>(node->right)].depth = node->depth + 1;
  }
  return tree;
}

// The nodes at one distance from their roots: inner nodes first, then leaves. All children of a
// level's nodes are in the next deeper level, so each state is gathered once.
struct Level {
  int64_t inner = 0, leaves = 0;
  Tensor children;  // rows of the deeper level, two for each inner node
};

struct Plan {
  std::vector<Level> levels;  // the deepest first
  std::vector<int64_t> leaves;
  Tensor words, labels;  // by level
};

Plan plan_of(const std::vector<Tree>& trees) {
  int deepest = 0;
  for (const Tree& tree : trees) {
    for (const Node& node : tree) deepest = std::max(deepest, node.depth);
  }
  Plan plan;
  std::vector<int64_t> words, labels;
  std::vector<std::vector<int64_t>> row(trees.size());
  for (size_t t = 0; t < trees.size(); ++t) row[t].resize(trees[t].size());
  for (int depth = deepest; depth >= 0; --depth) {
    Level level;
    std::vector<int64_t> children;
    int64_t next = 0;
    for (const bool inner : {true, false}) {
      for (size_t t = 0; t < trees.size(); ++t) {
        for (size_t n = 0; n < trees[t].size(); ++n) {
          const Node& node = trees[t][n];
          if (node.depth != depth || (node.left >= 0) != inner) continue;
          row[t][n] = next++;
          labels.push_back(node.label);
          ++(inner ? level.inner : level.leaves);
          if (!inner) words.push_back(node.word);
          if (!inner) continue;
          children.push_back(row[t][static_cast<size_t>(node.left)]);
          children.push_back(row[t][static_cast<size_t>(node.right)]);
        }
      }
    }
    level.children = as_tensor(children);
    plan.leaves.push_back(level.leaves);
    plan.levels.push_back(std::move(level));
  }
  plan.words = as_tensor(words);
  plan.labels = as_tensor(labels);
  return plan;
}

class TreeLstm final : public Workload {
 public:
  TreeLstm(int64_t hidden, bool fused)
      : hidden_(hidden),
        fused_(fused),
        embedding_(kVocabulary, kEmbedding),
        classifier_(hidden, kLabels),
        words_(ids(kVocabulary)),
        labels_(ids(kLabels)),
        node_cell_(autobatch::cell(
            [this](const State& left, const State& right) { return node(left, right); }, "node")),
        leaf_cell_(autobatch::cell([this](const Tensor& word) { return leaf(word); }, "leaf")),
        loss_cell_(autobatch::cell(
            [this](const Tensor& h, const Tensor& label) { return node_loss(h, label); }, "loss")) {
    for (int k = 0; k < (fused ? 1 : 3); ++k)
      leaf_gates_.emplace_back(kEmbedding, (fused ? 3 : 1) * hidden);
    for (int k = 0; k < (fused ? 1 : 5); ++k)
      gates_.emplace_back(2 * hidden, (fused ? 5 : 1) * hidden);
    std::mt19937 draw(1);
    for (size_t k = 0; k < kMinibatches; ++k) {
      auto& trees = minibatches_.emplace_back();
      for (size_t i = 0; i < kMinibatch; ++i) trees.push_back(random_tree(draw));
      plans_.push_back(plan_of(trees));
    }
  }

  std::string name() const override {
    return "Tree-LSTM " + std::to_string(hidden_) + (fused_ ? ", fused gates" : ", separate gates");
  }

  Tensors parameters() const override {
    Tensors all = embedding_->parameters();
    const auto add = [&](const auto& module) {
      for (const Tensor& p : module->parameters()) all.push_back(p);
    };
    add(classifier_);
    for (const auto& gate : leaf_gates_) add(gate);
    for (const auto& gate : gates_) add(gate);
    return all;
  }

  Tensor loss(size_t k, size_t example, bool cells) override {
    const Tree& tree = minibatches_[k][example];
    std::vector<State> states;
    states.reserve(tree.size());
    Tensor total;
    for (const Node& of : tree) {
      if (of.left < 0) {
        const Tensor& word = words_[static_cast<size_t>(of.word)];
        states.push_back(cells ? leaf_cell_(word) : leaf(word));
      } else {
        const State &left = states[static_cast<size_t>(of.left)],
                    &right = states[static_cast<size_t>(of.right)];
        states.push_back(cells ? node_cell_(left, right) : node(left, right));
      }
      const Tensor& h = states.back().first;
      const Tensor& label = labels_[static_cast<size_t>(of.label)];
      const Tensor loss = cells ? loss_cell_(h, label) : node_loss(h, label);
      total = total.defined() ? total + loss : loss;
    }
    return total;
  }

  Tensor loss_by_hand(size_t k) override {
    const Plan& plan = plans_[k];
    const auto [leaf_h, leaf_c] = leaf(plan.words);
    const auto h_leaves = leaf_h.split_with_sizes(plan.leaves);
    const auto c_leaves = leaf_c.split_with_sizes(plan.leaves);
    Tensor h, c;
    Tensors states;
    for (size_t l = 0; l < plan.levels.size(); ++l) {
      const Level& level = plan.levels[l];
      if (level.inner == 0) {
        h = h_leaves[l], c = c_leaves[l];
      } else {
        // The two children of a node are adjacent rows, so a view as [n, 2H] concatenates them.
        const Tensor h_pairs = h.index_select(0, level.children).view({level.inner, 2 * hidden_});
        const Tensor c_pairs = c.index_select(0, level.children).view({level.inner, 2, hidden_});
        std::tie(h, c) = inner_by_hand(h_pairs, c_pairs);
        if (level.leaves > 0) h = at::cat({h, h_leaves[l]}), c = at::cat({c, c_leaves[l]});
      }
      states.push_back(h);
    }
    return at::cross_entropy_loss(classifier_(at::cat(states)), plan.labels, {},
                                  at::Reduction::Sum);
  }

 private:
  // Returns the gates' pre-activations.
  static Tensors products(std::vector<torch::nn::Linear>& linears, const Tensor& x, int64_t count) {
    if (linears.size() == 1) return linears[0](x).chunk(count, 1);
    Tensors gates;
    for (auto& linear : linears) gates.push_back(linear(x));
    return gates;
  }

  State leaf(const Tensor& word) {
    const Tensors gates = products(leaf_gates_, embedding_(word), 3);
    const Tensor c = at::sigmoid(gates[0]) * at::tanh(gates[2]);
    return {at::sigmoid(gates[1]) * at::tanh(c), c};
  }

  State node(const State& left, const State& right) {
    const Tensors gates = products(gates_, at::cat({left.first, right.first}, 1), 5);
    const Tensor c = at::sigmoid(gates[0]) * at::tanh(gates[2]) +
                     at::sigmoid(gates[3]) * left.second + at::sigmoid(gates[4]) * right.second;
    return {at::sigmoid(gates[1]) * at::tanh(c), c};
  }

  Tensor node_loss(const Tensor& h, const Tensor& label) {
    return at::cross_entropy_loss(classifier_(h), label);
  }

  State inner_by_hand(const Tensor& h_pairs, const Tensor& c_pairs) {
    Tensors gates;
    Tensor forgotten;
    if (fused_) {
      gates = gates_[0](h_pairs).split_with_sizes({hidden_, hidden_, hidden_, 2 * hidden_}, 1);
      forgotten = (at::sigmoid(gates[3]).view_as(c_pairs) * c_pairs).sum(1);
    } else {
      gates = products(gates_, h_pairs, 5);
      const Tensors c = c_pairs.unbind(1);
      forgotten = at::addcmul(at::sigmoid(gates[3]) * c[0], at::sigmoid(gates[4]), c[1]);
    }
    const Tensor c = at::addcmul(forgotten, at::sigmoid(gates[0]), at::tanh(gates[2]));
    return {at::sigmoid(gates[1]) * at::tanh(c), c};
  }

  int64_t hidden_;
  bool fused_;
  torch::nn::Embedding embedding_;
  torch::nn::Linear classifier_;
  std::vector<torch::nn::Linear> leaf_gates_, gates_;
  Tensors words_, labels_;
  std::function<State(const State&, const State&)> node_cell_;
  std::function<State(const Tensor&)> leaf_cell_;
  std::function<Tensor(const Tensor&, const Tensor&)> loss_cell_;
  std::vector<std::vector<Tree>> minibatches_;
  std::vector<Plan> plans_;
};

}  // namespace

std::unique_ptr<Workload> make_tree_lstm(int64_t hidden, bool fused) {
  return std::make_unique<TreeLstm>(hidden, fused);
}

Tensors ids(int64_t count) { return at::arange(count).unsqueeze(1).unbind(0); }

Tensor as_tensor(const std::vector<int64_t>& values) {
  Tensor made = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), made.mutable_data_ptr<int64_t>());
  return made;
}

}  // namespace benchmarks

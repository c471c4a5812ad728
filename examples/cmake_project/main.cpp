// Trains a Tree-LSTM on a file of trees. The model computes single trees; autobatch makes
// minibatches of them.
#include "model.h"

#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <autobatch/autobatch.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Options {
  std::string trees = "trees.txt";
  int64_t hidden = 64, minibatch = 16, epochs = 8;
  bool eager = false, check = false, report = true;
};

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const auto number = [&] {
      if (i + 1 == count) throw std::runtime_error(argument + " needs a number");
      return std::stoll(arguments[++i]);
    };
    if (argument == "--epochs")
      options.epochs = number();
    else if (argument == "--hidden")
      options.hidden = number();
    else if (argument == "--minibatch")
      options.minibatch = number();
    else if (argument == "--eager")
      options.eager = true;
    else if (argument == "--check")
      options.check = true;
    else if (argument.starts_with("-"))
      throw std::runtime_error("unknown option " + argument);
    else
      options.trees = argument;
  }
  return options;
}

using Trees = std::vector<const Tree*>;

torch::Tensor eager_loss(TreeLstm& model, const Trees& trees) {
  torch::Tensor total = torch::zeros({});
  for (const Tree* tree : trees) total = total + model->loss(*tree);
  return total;
}

// Returns the same loss as `eager_loss`, batched. Only the scope is different.
torch::Tensor batched_loss(TreeLstm& model, const Trees& trees,
                           std::optional<autobatch::Report>& report) {
  autobatch::BatchScope scope;
  torch::Tensor total = torch::zeros({});
  for (const Tree* tree : trees) total = total + model->loss(*tree);
  scope.close();
  report = scope.report();
  return total;
}

// Returns the largest difference between the gradients of both losses, relative to the largest
// gradient.
double difference(TreeLstm& model, const Trees& trees) {
  std::optional<autobatch::Report> report;
  const auto gradients = [&](const torch::Tensor& loss) {
    model->zero_grad();
    loss.backward();
    std::vector<torch::Tensor> copies;
    for (const auto& parameter : model->parameters()) copies.push_back(parameter.grad().clone());
    return copies;
  };
  const auto expected = gradients(eager_loss(model, trees));
  const auto found = gradients(batched_loss(model, trees, report));
  double largest = 0, worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, expected[i].abs().max().item<double>());
    worst = std::max(worst, (expected[i] - found[i]).abs().max().item<double>());
  }
  return worst / largest;
}

double accuracy(TreeLstm& model, const Trees& trees) {
  const torch::NoGradGuard no_grad;
  // Each tree's label is read as soon as it is computed. In fibers, such reads do not prevent
  // batching.
  const auto is_right = [&](size_t i) { return model->label(*trees[i]) == trees[i]->label; };
  size_t right = 0;
  if (autobatch::has_map()) {
    for (const bool each : autobatch::map(trees.size(), is_right)) right += each ? 1 : 0;
  } else {
    for (size_t i = 0; i < trees.size(); ++i) right += is_right(i) ? 1 : 0;
  }
  return static_cast<double>(right) / static_cast<double>(trees.size());
}

void train(const Options& options) {
  const Treebank bank = read_treebank(options.trees);
  torch::manual_seed(0);
  TreeLstm model(static_cast<int64_t>(bank.vocabulary.size()), options.hidden, 5);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));
  Trees all;
  for (const auto& tree : bank.trees) all.push_back(tree.get());
  if (options.check) {
    std::printf("gradients differ from eager's by %.1e of the largest\n", difference(model, all));
  }
  std::optional<autobatch::Report> report;
  const auto step = static_cast<size_t>(options.minibatch);
  for (int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    double total = 0;
    for (size_t first = 0; first < all.size(); first += step) {
      const size_t end = std::min(first + step, all.size());
      const Trees minibatch(all.begin() + static_cast<std::ptrdiff_t>(first),
                            all.begin() + static_cast<std::ptrdiff_t>(end));
      optimizer.zero_grad();
      const torch::Tensor loss =
          options.eager ? eager_loss(model, minibatch) : batched_loss(model, minibatch, report);
      loss.backward();
      optimizer.step();
      total += loss.item<double>();
    }
    std::printf("epoch %lld: loss %.3f a tree\n", static_cast<long long>(epoch),
                total / static_cast<double>(all.size()));
  }
  std::printf("accuracy at the roots: %.2f\n", accuracy(model, all));
  if (report) std::printf("%s\n", report->to_string().c_str());
}

}  // namespace

int main(int count, char** arguments) {
  try {
    std::printf("%s\n", autobatch::build_info().c_str());
    train(parse(count, arguments));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}

// Includes the public headers only, as a LibTorch program does.
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/serialize.h>

#include <autobatch/autobatch.h>

#include "catch.h"

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

const auto kDouble = at::TensorOptions().dtype(at::kDouble);

Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes, kDouble).requires_grad_(); }

Tensors leaves(size_t count, at::IntArrayRef sizes) {
  Tensors made;
  for (size_t i = 0; i < count; ++i) made.push_back(leaf(sizes));
  return made;
}

Tensors gradients_of(const Tensors& tensors) {
  Tensors gradients;
  for (const Tensor& tensor : tensors) {
    gradients.push_back(tensor.grad().defined() ? tensor.grad().clone() : Tensor());
    tensor.mutable_grad().reset();
  }
  return gradients;
}

void check_equal(const Tensors& found, const Tensors& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    REQUIRE(found[i].defined() == expected[i].defined());
    if (!found[i].defined()) continue;
    CHECK(found[i].sizes() == expected[i].sizes());
    CHECK(at::allclose(found[i], expected[i], 1e-9, 1e-12));
  }
}

// Runs the program eagerly and in a scope. Compares results and the gradients of the leaves `of`.
template <class Program>
autobatch::Report check_program(const Tensors& of, const Program& program,
                                const autobatch::ScopeOptions& options = {}) {
  const auto finish = [&](const Tensors& results) {
    Tensor total = at::zeros({}, kDouble);
    for (const Tensor& result : results) total = total + (result * result).sum();
    total.backward();
    Tensors all = gradients_of(of);
    for (const Tensor& result : results) all.push_back(result.detach());
    return all;
  };
  const Tensors expected = finish(program());
  autobatch::BatchScope scope(options);
  const Tensors results = program();
  scope.close();
  check_equal(finish(results), expected);
  return scope.report();
}

const autobatch::SignatureReport& row_of(const autobatch::Report& report, const std::string& op) {
  for (const auto& row : report.signatures) {
    if (row.op == op) return row;
  }
  throw std::runtime_error("no row for " + op);
}

// --- scopes ---

TEST_CASE("api: a scope batches, and close() throws what fails", "[api]") {
  const Tensor w = leaf({4, 4});
  const Tensors xs = leaves(5, {1, 4});
  Tensors all = xs;
  all.push_back(w);
  const auto report = check_program(all, [&] {
    Tensors out;
    for (const Tensor& x : xs) out.push_back(at::tanh(at::linear(x, w)));
    return out;
  });
  CHECK(row_of(report, "aten::linear").batches == 1);
  CHECK(report.launches_saved() > 0);
  CHECK(report.to_string().find("aten::linear") != std::string::npos);

  const Tensor table = leaf({3, 2});
  autobatch::BatchScope scope;
  const Tensor bad = at::embedding(table, at::full({1}, 7, at::kLong));
  CHECK(autobatch::is_pending(bad));
  CHECK_THROWS(scope.close());
  scope.close();  // a second call does nothing
  CHECK(!autobatch::is_pending(leaf({2})));
}

TEST_CASE("api: roots given to the scope run as one backward", "[api]") {
  const Tensor w = leaf({4, 4});
  const Tensors xs = leaves(5, {1, 4});
  for (const Tensor& x : xs) at::linear(x, w).sum().backward();
  const Tensors expected = gradients_of({w});
  {
    autobatch::BatchScope scope;
    for (const Tensor& x : xs) scope.backward(at::linear(x, w).sum());
    CHECK(!w.grad().defined());
  }
  check_equal(gradients_of({w}), expected);

  autobatch::BatchScope scope;
  const Tensor y = at::linear(xs[0], w);
  CHECK_THROWS(scope.backward(y));
  scope.backward(y, at::ones_like(y));
  scope.close();
  CHECK(w.grad().defined());
  CHECK_THROWS(scope.backward(y.sum()));
}

TEST_CASE("api: an exception in a scope drops its roots and its errors", "[api]") {
  const Tensor w = leaf({4, 4});
  try {
    autobatch::BatchScope scope;
    scope.backward(at::linear(leaf({1, 4}), w).sum());
    throw std::runtime_error("mine");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()) == "mine");
  }
  CHECK(!w.grad().defined());
}

// --- policies ---

// Runs each node alone. With `wrong`, in reverse order, which is invalid.
class SingleNodePolicy final : public autobatch::Policy {
 public:
  explicit SingleNodePolicy(bool wrong) : wrong_(wrong) {}
  std::string_view name() const override { return "single"; }
  autobatch::Schedule schedule(const autobatch::ScheduleInput& graph) const override {
    autobatch::Schedule made;
    const uint32_t n = graph.num_nodes();
    for (uint32_t i = 0; i < n; ++i) made.order.push_back(wrong_ ? n - 1 - i : i);
    for (uint32_t i = 0; i <= n; ++i) made.batch_begin.push_back(i);
    return made;
  }

 private:
  bool wrong_;
};

TEST_CASE("api: a policy of one's own, which is checked", "[api]") {
  const Tensors xs = leaves(4, {3});
  const auto program = [&] {
    Tensors out;
    for (const Tensor& x : xs) out.push_back(at::exp(at::tanh(x)));
    return out;
  };
  autobatch::ScopeOptions options;
  options.own_policy = std::make_shared<SingleNodePolicy>(false);
  const auto report = check_program(xs, program, options);
  CHECK(report.batches == report.nodes);
  options.own_policy = std::make_shared<SingleNodePolicy>(true);
  autobatch::BatchScope scope(options);
  const Tensors results = program();
  CHECK_THROWS_AS(scope.close(), std::logic_error);
  options.own_policy = nullptr;
  options.policy = "nobody's";
  CHECK_THROWS_AS(autobatch::BatchScope(options), std::invalid_argument);
}

// --- cells ---

using State = std::pair<Tensor, Tensor>;

struct Nodes {
  Tensor w = leaf({6, 4});
  int runs = 0;

  State operator()(const State& left, const State& right) {
    ++runs;
    const auto gates =
        at::linear(at::cat({left.first, right.first}, 1), w.view({6, 4})).chunk(3, 1);
    const Tensor c = at::sigmoid(gates[0]) * left.second + at::tanh(gates[1]) * right.second;
    return {at::sigmoid(gates[2]) * at::tanh(c), c};
  }
};

// Returns the final states of chains of every length. Each node combines the previous state and a
// leaf.
template <class Node>
Tensors chain(const Tensors& leaves, const Node& node) {
  Tensors results;
  for (size_t length = 2; length <= leaves.size(); ++length) {
    State state{leaves[0], at::tanh(leaves[0])};
    for (size_t i = 1; i < length; ++i) state = node(state, State{leaves[i], at::exp(leaves[i])});
    results.push_back(state.first);
  }
  return results;
}

TEST_CASE("api: sizes that follow from values are eager's", "[api]") {
  // Without Python these ops have no Meta kernels.
  const auto of = [](const Tensor& x) {
    return at::index(x, {x.select(1, 0) > 0}).sum() +
           at::repeat_interleave(x, (x.select(1, 0) > 0).to(at::kLong) + 1, 0).square().sum() +
           at::where(x > 0).front().sum();
  };
  const at::NoGradGuard no_grad;
  const Tensor w = at::randn({3, 3}, kDouble);
  Tensors inputs, results;
  for (int64_t n = 1; n < 6; ++n) inputs.push_back(at::randn({n, 3}, kDouble));
  autobatch::BatchScope scope;
  for (const Tensor& x : inputs) results.push_back(of(at::mm(x, w)));
  scope.close();
  for (size_t i = 0; i < inputs.size(); ++i) {
    CHECK(at::allclose(results[i], of(at::mm(inputs[i], w))));
  }
}

TEST_CASE("cell: C++ types of arguments tell kinds apart", "[cell]") {
  const auto times = autobatch::cell([](const Tensor& x, auto k) { return (x * k) * 2; });
  const Tensor ones = at::ones({2}, at::kLong);
  autobatch::BatchScope scope;
  const Tensor x = ones * 1;
  const Tensor a = times(x, int64_t{0}), b = times(x, 0.0), c = times(x, int64_t{1});
  const Tensor d = times(x, true);
  scope.close();
  CHECK(a.scalar_type() == at::kLong);
  CHECK(b.scalar_type() == at::kFloat);
  CHECK(at::equal(c, ones * 2));
  CHECK(at::equal(d, ones * 2));
}

TEST_CASE("cell: runs once for each kind of call, with eager's values and gradients",
          "[api][cell]") {
  Nodes nodes;
  const auto node = autobatch::cell(std::ref(nodes), "node");
  const Tensors xs = leaves(6, {1, 2});
  Tensors all = xs;
  all.push_back(nodes.w);
  check_program(all, [&] { return chain(xs, node); });
  // The eager run calls the function 15 times, once per node. The cell calls it once per kind of
  // call: two leaves, or a node and a leaf.
  CHECK(nodes.runs < 15 + 4);
  const auto plain = [&](const State& a, const State& b) { return nodes(a, b); };
  const auto with_cells = check_program(all, [&] { return chain(xs, node); });
  const auto without = check_program(all, [&] { return chain(xs, plain); });
  CHECK(with_cells.batches < without.batches);  // a call of the cell is one node
  CHECK(with_cells.ops == without.ops);

  nodes.runs = 0;
  autobatch::ScopeOptions options;
  options.cells = false;
  check_program(all, [&] { return chain(xs, node); }, options);
  CHECK(nodes.runs == 30);
}

TEST_CASE("cell: arguments and results of every kind", "[api][cell]") {
  enum class Mode { kTanh, kExp };
  int runs = 0;
  const auto mixed =
      autobatch::cell([&](const Tensors& list, std::optional<Tensor> bias, double scale, Mode mode,
                          bool twice, const std::string& note) {
        ++runs;
        Tensors out;
        for (const Tensor& x : list) {
          Tensor y = (mode == Mode::kTanh ? at::tanh(x) : at::exp(x)) * scale;
          if (bias) y = y + *bias;
          if (twice) y = y * 2.0;
          out.push_back(y);
        }
        return std::make_tuple(out, std::array<Tensor, 2>{out[0], Tensor()}, note.size(),
                               std::optional<Tensor>(list[0]), std::string("made"));
      });
  const Tensors xs = leaves(6, {2});
  const Tensor bias = leaf({2});
  Tensors all = xs;
  all.push_back(bias);
  const auto program = [&] {
    Tensors out;
    for (size_t i = 0; i < 6; ++i) {
      for (const bool twice : {false, true}) {
        const Tensors list(xs.begin(), xs.begin() + 1 + static_cast<std::ptrdiff_t>(i % 3));
        const auto mode = i % 2 == 0 ? Mode::kTanh : Mode::kExp;
        auto [many, pair, size, same, text] =
            mixed(list, i < 3 ? std::optional(bias) : std::nullopt, i < 2 ? 0.5 : 2.0, mode, twice,
                  "note");
        REQUIRE(many.size() == list.size());
        REQUIRE(size == 4);
        REQUIRE(text == "made");
        REQUIRE(!pair[1].defined());
        REQUIRE(same->is_same(list[0]));
        out.insert(out.end(), many.begin(), many.end());
        out.push_back(pair[0]);
      }
    }
    return out;
  };
  check_program(all, program);
  runs = 0;
  for (int i = 0; i < 2; ++i) {
    autobatch::BatchScope scope;
    for (int repeat = 0; repeat < 3; ++repeat) program();
  }
  CHECK(runs == 24);  // 12 kinds in each of two scopes
}

TEST_CASE("cell: one that reads a value throws; one that is not captured runs op by op",
          "[api][cell]") {
  const Tensor w = leaf({2, 2});
  const auto reads = autobatch::cell(
      [&](const Tensor& x) {
        const Tensor y = at::tanh(at::mv(w, x));
        return y.sum().item<double>() > 0 ? y : at::neg(y);
      },
      "reader");
  const Tensor x = leaf({2});
  {
    autobatch::BatchScope scope;
    CHECK_THROWS_WITH(reads(x), ContainsSubstring("the cell 'reader' reads a tensor's value"));
  }
  const auto writes = autobatch::cell(
      [&](const Tensor& v) {
        const Tensor y = at::mv(w, v);
        y.mul_(2.0);
        return y + 1.0;
      },
      "writer");
  const auto report = check_program({w, x}, [&] { return Tensors{writes(x), writes(x)}; });
  const auto& rows = report.at_once;
  CHECK(std::any_of(rows.begin(), rows.end(), [](const auto& row) { return row.op == "writer"; }));
}

TEST_CASE("cell: check_cells finds a function that depends on something else", "[api][cell]") {
  double factor = 1;
  const auto scaled =
      autobatch::cell([&](const Tensor& x) { return at::tanh(x) * factor; }, "scaled");
  const Tensors xs = leaves(2, {2});
  autobatch::ScopeOptions options;
  options.check_cells = true;
  autobatch::BatchScope scope(options);
  const Tensor first = scaled(xs[0]), second = scaled(xs[1]);
  factor = 2;
  CHECK_THROWS_WITH(scaled(xs[1]), ContainsSubstring("the cell 'scaled'"));
}

TEST_CASE("cell: within map's instances", "[api][cell]") {
  if (!autobatch::has_map()) return;
  Nodes nodes;
  const auto node = autobatch::cell(std::ref(nodes), "node");
  const Tensors xs = leaves(5, {1, 2});
  const auto walk = [&](size_t i) {
    State state{xs[i], at::tanh(xs[i])};
    for (int step = 0; step < 5; ++step) {
      state = node(state, State{xs[i], xs[i]});
      if (state.first.sum().item<double>() > 0.1 * static_cast<double>(i)) break;
    }
    return state.first;
  };
  Tensors expected;
  for (size_t i = 0; i < xs.size(); ++i) expected.push_back(walk(i));
  check_equal(autobatch::map(xs.size(), walk), expected);
}

// --- modules ---

TEST_CASE("api: torch::nn modules, as cells too", "[api]") {
  torch::nn::LSTMCell lstm(3, 4);
  torch::nn::Linear output(4, 2);
  lstm->to(at::kDouble);
  output->to(at::kDouble);
  Tensors all = lstm->parameters();
  for (const Tensor& p : output->parameters()) all.push_back(p);
  const Tensors xs = leaves(6, {1, 3});
  all.insert(all.end(), xs.begin(), xs.end());
  const auto as_cell = autobatch::cell(output, "output");
  const auto report = check_program(all, [&] {
    Tensors out;
    for (size_t n = 1; n <= xs.size(); ++n) {
      auto state = std::make_tuple(at::zeros({1, 4}, kDouble), at::zeros({1, 4}, kDouble));
      for (size_t t = 0; t < n; ++t) state = lstm(xs[t], state);
      out.push_back(as_cell(std::get<0>(state)));
    }
    return out;
  });
  CHECK(row_of(report, "aten::lstm_cell").batches == 6);
  CHECK(row_of(report, "aten::addmm").batches == 1);
}

torch::jit::Module saved_and_loaded(const std::string& source, const Tensor& weight) {
  torch::jit::Module module("M");
  module.register_parameter("weight", weight, false);
  module.define(source);
  std::stringstream file;
  module.save(file);
  return torch::jit::load(file);
}

TEST_CASE("api: TorchScript modules that were loaded", "[api][jit]") {
  auto module = saved_and_loaded(R"(
    def forward(self, x, n: int):
        h = torch.zeros_like(x)
        for i in range(n):
            h = torch.tanh(torch.matmul(x + h, self.weight))
            if bool(h.sum() > 0.5):
                h = h * 0.5
        return h
  )",
                                 leaf({3, 3}).detach());
  module.train();
  const Tensor weight = module.attr("weight").toTensor().requires_grad_();
  const Tensors xs = leaves(4, {1, 3});
  Tensors all = xs;
  all.push_back(weight);
  const auto program = [&] {
    Tensors out;
    for (size_t i = 0; i < xs.size(); ++i) {
      const Tensor x = at::tanh(xs[i]);
      out.push_back(module.forward({x, static_cast<int64_t>(i + 1)}).toTensor() * 2.0);
    }
    return out;
  };
  for (int round = 0; round < 4; ++round)
    check_program(all, program);  // TorchScript profiles first and optimises later
  module.eval();
  for (int round = 0; round < 4; ++round) check_program(all, program);
  const at::NoGradGuard no_grad;
  for (int round = 0; round < 4; ++round) {
    const Tensors expected = program();
    autobatch::BatchScope scope;
    const Tensors found = program();
    scope.close();
    check_equal(found, expected);
  }
}

TEST_CASE("api: what is loaded in a scope has its values", "[api][jit]") {
  std::stringstream tensor_file, module_file, script_file;
  const Tensor before = leaf({2, 3}).detach();
  torch::save(before, tensor_file);
  torch::nn::Linear linear(3, 2);
  torch::save(linear, module_file);
  torch::jit::Module script("M");
  script.register_parameter("weight", before, false);
  script.define("def forward(self, x):\n  return x + self.weight\n");
  script.save(script_file);

  autobatch::BatchScope scope;
  Tensor loaded;
  torch::load(loaded, tensor_file);
  torch::nn::Linear other(3, 2);
  torch::load(other, module_file);
  const auto module = torch::jit::load(script_file);
  const Tensor twice = loaded * 2.0;
  const Tensor y = other(at::ones({3}));
  const Tensor z = module.get_method("forward")({at::ones({2, 3}, kDouble)}).toTensor();
  scope.close();
  check_equal({loaded, twice}, {before, before * 2.0});
  check_equal({other->weight.detach(), y.detach()},
              {linear->weight.detach(), linear(at::ones({3})).detach()});
  check_equal({z}, {before + 1.0});
}

TEST_CASE("api: below autograd nothing is recorded", "[api]") {
  const Tensor x = leaf({3});
  Tensor product, view;
  {
    autobatch::BatchScope scope;
    const at::AutoDispatchBelowADInplaceOrView below;
    product = x * 2.0;
    view = at::tanh(x).view({3, 1});
    scope.close();
  }
  CHECK_FALSE(product.requires_grad());
  CHECK_FALSE(view.requires_grad());
  check_equal({product}, {(x * 2.0).detach()});
}

TEST_CASE("api: build_info names the versions", "[api]") {
  CHECK(autobatch::build_info().find("torch-autobatch ") == 0);
  CHECK(autobatch::build_info().find("CUDA kernels") != std::string::npos);
}

}  // namespace

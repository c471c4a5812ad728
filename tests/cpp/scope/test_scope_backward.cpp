#include "scope_test.h"

namespace autobatch {
namespace {

// --- backward ---

struct Model {
  Tensor w1 = leaf({5, 3}), b1 = leaf({5}), w2 = leaf({1, 5});
  Tensors x = constants(6, {3});

  Tensor loss(size_t i) const {
    return at::linear(at::tanh(at::linear(x[i], w1, b1)), w2).square().sum();
  }
  Tensors losses() const {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) out.push_back(loss(i));
    return out;
  }
  Tensors parameters() const { return {w1, b1, w2}; }
  // Returns the gradients accumulated in the parameters and resets them.
  Tensors take() const {
    Tensors out;
    for (Tensor p : parameters()) {
      out.push_back(p.grad());
      p.mutable_grad() = Tensor();
    }
    return out;
  }
};

TEST_CASE("scope: backward after the block", "[scope]") {
  const Model model;
  torch::autograd::backward({at::stack(model.losses()).sum()}, {});
  const Tensors eager = model.take();
  Tensors losses;
  {
    BatchScope scope;
    losses = model.losses();
  }
  SECTION("of the sum") { torch::autograd::backward({at::stack(losses).sum()}, {}); }
  SECTION("of all at once") { torch::autograd::backward(losses, {}); }
  SECTION("of each") {
    for (const Tensor& loss : losses) loss.backward();
  }
  SECTION("of each, backwards") {
    for (size_t i = losses.size(); i-- > 0;) losses[i].backward();
  }
  check_same(model.take(), eager);
}

TEST_CASE("scope: backward inside the block", "[scope]") {
  const Model model;
  torch::autograd::backward({at::stack(model.losses()).sum()}, {});
  const Tensors eager = model.take();
  {
    BatchScope scope;
    const Tensors losses = model.losses();
    SECTION("of the sum, captured") { torch::autograd::backward({at::stack(losses).sum()}, {}); }
    SECTION("of all at once") { torch::autograd::backward(losses, {}); }
    SECTION("of each") {
      for (const Tensor& loss : losses) loss.backward();
    }
    check_same(model.take(), eager);
    CHECK(is_pending(model.loss(0)));  // capture goes on
  }
}

TEST_CASE("scope: backward of a root from before the block", "[scope]") {
  const Model model;
  const Tensor root = model.loss(0);
  model.loss(0).backward();
  const Tensors eager = model.take();
  BatchScope scope;
  const Tensor pending = model.loss(1);
  root.backward();
  check_same(model.take(), eager);
}

TEST_CASE("scope: instances that are left out contribute nothing", "[scope]") {
  Model model;
  model.x[1] = at::full({3}, std::numeric_limits<double>::quiet_NaN(), at::kDouble);
  model.x[4] = at::full({3}, std::numeric_limits<double>::infinity(), at::kDouble);
  torch::autograd::backward({model.loss(0) + model.loss(2) + model.loss(5)}, {});
  const Tensors eager = model.take();
  Tensors losses;
  {
    BatchScope scope;
    losses = model.losses();
  }
  CHECK(std::isnan(losses[1].item<double>()));
  torch::autograd::backward({losses[0] + losses[2] + losses[5]}, {});
  const Tensors ours = model.take();
  for (const Tensor& grad : ours) CHECK(at::isfinite(grad).all().item<bool>());
  check_same(ours, eager);
}

TEST_CASE("scope: a second backward is eager's error, or allowed with retain_graph", "[scope]") {
  const Model model;
  model.loss(0).backward();
  const Tensors eager = model.take();
  Tensors losses;
  {
    BatchScope scope;
    losses = model.losses();
  }
  losses[0].backward({}, /*retain_graph=*/true);
  check_same(model.take(), eager);
  losses[0].backward();
  check_same(model.take(), eager);
  try {
    losses[0].backward();
    FAIL_CHECK("a second backward was accepted");
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    CHECK(what.find("a second time") != std::string::npos);
  }
  losses[1].backward();  // another instance has another autograd graph
}

TEST_CASE("scope: a held value is on the path of what was computed from it", "[scope]") {
  const Tensor w = leaf({3, 3});
  const Tensors x = constants(4, {3});
  Tensors h, losses;
  const auto run = [&] {
    h.clear();
    losses.clear();
    for (const Tensor& t : x) {
      h.push_back(at::tanh(at::linear(t, w)));
      losses.push_back(at::linear(h.back(), w).square().sum());
    }
  };
  run();
  Tensors eager;
  for (size_t i = 0; i < x.size(); ++i) {
    eager.push_back(torch::autograd::grad({losses[i]}, {h[i]}, {}, true)[0]);
  }
  const Tensors eager_w = gradients(at::stack(losses).sum(), {w});
  {
    BatchScope scope;
    run();
  }
  for (size_t i = 0; i < x.size(); ++i) {
    CAPTURE(i);
    check_same(torch::autograd::grad({losses[i]}, {h[i]}, {}, true)[0], eager[i]);
  }
  check_same(gradients(at::stack(losses).sum(), {w}), eager_w);
}

TEST_CASE("scope: hooks and retain_grad of held values", "[scope]") {
  const Tensors x = leaves(3, {3});
  Tensors h, losses;
  int calls = 0;
  {
    BatchScope scope;
    for (const Tensor& t : x) {
      h.push_back(at::tanh(t));
      losses.push_back((h.back() * h.back()).sum());
    }
    h[0].register_hook([&](const Tensor& grad) {
      ++calls;
      return grad * 10;
    });
    h[1].retain_grad();
  }
  torch::autograd::backward(losses, {});
  CHECK(calls == 1);
  check_same(h[1].grad(), 2 * at::tanh(x[1]).detach());
  for (size_t i = 0; i < x.size(); ++i) {
    CAPTURE(i);
    const Tensor y = at::tanh(x[i]).detach();
    check_same(x[i].grad(), (i == 0 ? 10 : 1) * 2 * y * (1 - y.square()));
  }
}

// --- weights and matrices ---

TEST_CASE("scope: weights are told apart by identity", "[scope]") {
  const Tensors x = constants(6, {3});
  const Tensors w = leaves(2, {4, 3});
  const Report report = check_program(w, [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) out.push_back(at::linear(x[i], w[i % 2]));
    return out;
  });
  CHECK(report.batches == 2);
  CHECK(row_of(report, "aten::linear").largest == 3);
}

TEST_CASE("scope: a view of a weight written out for each instance is one weight", "[scope]") {
  const bool trained = GENERATE(true, false);
  const Tensors x = leaves(5, {2, 3});
  const Tensor w = constant({4, 3}).requires_grad_(trained);
  const Report report = check_program(trained ? joined({x, {w}}) : x, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::mm(t, w.t()));
    return out;
  });
  CHECK(report.batches == 1);
}

TEST_CASE("scope: parts of one weight are different weights", "[scope]") {
  const Tensors x = constants(4, {3});
  const Tensor w = leaf({4, 3});
  const Report report = check_program({w}, [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::linear(x[i], w.narrow(0, i % 2 == 0 ? 0 : 2, 2)));
    }
    return out;
  });
  CHECK(row_of(report, "aten::linear").batches == 2);
}

TEST_CASE("scope: matrices of each instance are one batched product", "[scope]") {
  const Tensors p = leaves(5, {4, 3});
  const Tensors v = leaves(5, {3, 2});
  const Report report = check_program(joined({p, v}), [&] {
    Tensors out;
    for (size_t i = 0; i < p.size(); ++i) out.push_back(at::matmul(at::tanh(p[i]), at::tanh(v[i])));
    return out;
  });
  CHECK(row_of(report, "aten::matmul").instances == 5);
  CHECK(row_of(report, "aten::matmul").batches == 1);
}

TEST_CASE("scope: a matrix of each instance times its vector", "[scope]") {
  const Tensors p = leaves(5, {4, 3});
  const Tensors v = leaves(5, {3});
  const Report report = check_program(joined({p, v}), [&] {
    Tensors out;
    for (size_t i = 0; i < p.size(); ++i) {
      out.push_back(at::mv(at::tanh(p[i]), at::tanh(v[i])));
      out.push_back(at::matmul(at::tanh(v[i]), at::tanh(p[i]).t()));
    }
    return out;
  });
  CHECK(row_of(report, "aten::mv").batches == 1);
  CHECK(row_of(report, "aten::matmul").batches == 1);
}

TEST_CASE("scope: matrices from outside, another one for each instance", "[scope]") {
  const Tensors m = leaves(4, {3, 3});
  const Tensors v = leaves(4, {3});
  check_program(joined({m, v}), [&] {
    Tensors out;
    for (size_t i = 0; i < m.size(); ++i) {
      const Tensor h = at::tanh(v[i]);
      out.push_back(at::matmul(m[i], h));
      out.push_back(at::matmul(h, m[i]));
      out.push_back(at::linear(h, m[i], v[i]));
      out.push_back(at::mm(m[i], m[(i + 1) % m.size()]));
    }
    return out;
  });
}

TEST_CASE("scope: a column, a vector and a matrix on the right of one weight", "[scope]") {
  const Tensor w = leaf({4, 3});
  const Tensors columns = leaves(2, {3, 1}), vectors = leaves(2, {3}), matrices = leaves(2, {3, 2});
  check_program(joined({{w}, columns, vectors, matrices}), [&] {
    Tensors out;
    for (const Tensors& list : {columns, vectors, matrices}) {
      for (const Tensor& t : list) out.push_back(at::matmul(w, at::tanh(t)));
    }
    return out;
  });
}

TEST_CASE("scope: a bias that all share, beside one of each instance", "[scope]") {
  const Tensors x = constants(4, {2, 3}), b = leaves(4, {2, 5}), row = leaves(4, {5});
  const Tensor w = leaf({3, 5}), shared = leaf({5});
  check_program(joined({b, row, {w, shared}}), [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::addmm(shared, x[i], w));
      out.push_back(at::addmm(b[i], x[i], w));
      out.push_back(at::addmm(at::tanh(row[i]), x[i], w));
      out.push_back(at::addmm(shared, x[i], w, 0.5, 2));
    }
    return out;
  });
}

}  // namespace
}  // namespace autobatch

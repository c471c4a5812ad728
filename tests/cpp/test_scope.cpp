#include "autobatch/scope.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#if __has_include(<catch2/catch.hpp>)
#include <catch2/catch.hpp>
#else
#include <catch2/catch_all.hpp>
#endif

#include "autobatch/compat.h"
#include "autobatch/pending_tensor.h"

namespace autobatch {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

bool is_pending(const Tensor& tensor) {
  const PendingTensor* pending = as_pending(tensor);
  return pending != nullptr && pending->is_pending();
}

Tensor constant(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }
Tensor leaf(at::IntArrayRef sizes) { return constant(sizes).requires_grad_(true); }

Tensors constants(size_t count, at::IntArrayRef sizes) {
  Tensors out;
  for (size_t i = 0; i < count; ++i) out.push_back(constant(sizes));
  return out;
}
Tensors leaves(size_t count, at::IntArrayRef sizes) {
  Tensors out;
  for (size_t i = 0; i < count; ++i) out.push_back(leaf(sizes));
  return out;
}
Tensors joined(std::initializer_list<Tensors> lists) {
  Tensors out;
  for (const Tensors& list : lists) out.insert(out.end(), list.begin(), list.end());
  return out;
}

// A loss in which every element counts, and each one differently.
Tensor loss_of(const Tensors& values) {
  Tensor loss = at::zeros({}, at::kDouble);
  double phase = 0;
  for (const Tensor& value : values) {
    const Tensor weights = at::arange(value.numel(), at::kDouble).add(phase++).cos();
    if (value.requires_grad()) loss = loss + (value.reshape({-1}) * weights).sum();
  }
  return loss;
}

Tensors gradients(const Tensor& loss, const Tensors& inputs) {
  return torch::autograd::grad({loss}, inputs, {}, std::nullopt, false, /*allow_unused=*/true);
}

void check_same(const Tensor& ours, const Tensor& eager) {
  REQUIRE(ours.defined() == eager.defined());
  if (!eager.defined()) return;
  CHECK(ours.sizes() == eager.sizes());
  CHECK(ours.scalar_type() == eager.scalar_type());
  CHECK(at::allclose(ours, eager, 1e-9, 1e-12, /*equal_nan=*/true));
}

void check_same(const Tensors& ours, const Tensors& eager) {
  REQUIRE(ours.size() == eager.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    CAPTURE(i);
    check_same(ours[i], eager[i]);
  }
}

using Program = std::function<Tensors()>;

// Runs the program eagerly and in a scope: the same values, metadata before they are computed and
// after, and gradients of `inputs`. Returns the report.
Report check_program(const Tensors& inputs, const Program& program,
                     const ScopeOptions& options = {}) {
  const Tensors eager = program();
  const Tensors eager_grads = inputs.empty() ? Tensors() : gradients(loss_of(eager), inputs);
  Tensors ours;
  Report report;
  {
    BatchScope scope(options);
    ours = program();
    REQUIRE(ours.size() == eager.size());
    for (size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      CHECK(ours[i].sizes() == eager[i].sizes());
      CHECK(ours[i].strides() == eager[i].strides());
      CHECK(ours[i].requires_grad() == eager[i].requires_grad());
    }
    scope.flush();
    report = scope.report();
  }
  for (const Tensor& value : ours) CHECK(as_pending(value) == nullptr);
  check_same(ours, eager);
  if (!inputs.empty()) check_same(gradients(loss_of(ours), inputs), eager_grads);
  return report;
}

// The rows of an op, added up.
SignatureReport row_of(const Report& report, std::string_view op) {
  SignatureReport sum;
  for (const SignatureReport& row : report.signatures) {
    if (row.op != op) continue;
    sum.instances += row.instances;
    sum.batches += row.batches;
    sum.launches += row.launches;
    sum.largest = std::max(sum.largest, row.largest);
  }
  return sum;
}

// --- capture and values ---

TEST_CASE("scope: ops on each instance's tensors give eager's values and gradients", "[scope]") {
  const Tensors x = constants(8, {3});
  const Tensor w = leaf({4, 3});
  const Tensor b = leaf({4});
  const Report report = check_program({w, b}, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::tanh(at::linear(t, w, b)));
    return out;
  });
  CHECK(report.ops == 16);
  CHECK(report.nodes == 16);
  CHECK(report.batches == 2);
  CHECK(report.launches == 2);
  CHECK(report.launches_saved() == 14);
  CHECK(report.lower_bound() == 2);
  CHECK(row_of(report, "aten::linear").largest == 8);
  CHECK(row_of(report, "aten::tanh").largest == 8);
}

TEST_CASE("scope: instances of different lengths are one batch", "[scope]") {
  Tensors x;
  for (const int64_t rows : {3, 1, 7, 2}) x.push_back(constant({rows, 3}));
  const Tensor w = leaf({4, 3});
  const Tensor b = leaf({4});
  const Report report = check_program({w, b}, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::log_softmax(at::tanh(at::linear(t, w, b)), -1);
      out.push_back(at::sum(h * h, at::IntArrayRef{0}));
    }
    return out;
  });
  for (const char* op : {"aten::linear", "aten::tanh", "aten::log_softmax.int", "aten::mul.Tensor",
                         "aten::sum.dim_IntList"}) {
    CAPTURE(op);
    CHECK(row_of(report, op).instances == 4);
    CHECK(row_of(report, op).batches == 1);
  }
}

TEST_CASE("scope: chains of different lengths share their batches", "[scope]") {
  const Tensors start = leaves(5, {4});
  const Tensor w = leaf({4, 4});
  const std::string policy = GENERATE("agenda", "depth");
  ScopeOptions options;
  options.policy = policy;
  const Report report = check_program(
      joined({start, {w}}),
      [&] {
        Tensors out;
        for (size_t i = 0; i < start.size(); ++i) {
          Tensor h = start[i];
          for (size_t step = 0; step <= i; ++step) h = at::tanh(at::linear(h, w) + start[i]);
          out.push_back(h);
        }
        return out;
      },
      options);
  CHECK(report.ops == 45);
  CHECK(report.lower_bound() == 15);
  CHECK(report.batches == 15);
}

TEST_CASE("scope: views are address arithmetic", "[scope]") {
  const Tensors x = leaves(4, {6});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(t);
      const Tensors parts = at::chunk(h, 3);
      out.push_back(parts[0] * parts[2]);
      out.push_back(h.view({2, 3}).t());
      out.push_back(at::exp(h.view({2, 3}).select(1, 1)));
      out.push_back(h.slice(0, 1, 6, 2).unsqueeze(0).expand({3, 3}));
    }
    return out;
  });
  CHECK(report.nodes == 12);
  CHECK(report.views > 0);
  CHECK(row_of(report, "aten::exp").batches == 1);
}

TEST_CASE("scope: metadata is exact before anything is computed", "[scope]") {
  const Tensor x = leaf({2, 3});
  const Tensor half = at::ones({2, 3}, at::kHalf).requires_grad_(true);
  BatchScope scope;
  const Tensor y = at::tanh(x);
  CHECK(is_pending(y));
  CHECK(y.sizes() == at::IntArrayRef({2, 3}));
  CHECK(y.strides() == at::IntArrayRef({3, 1}));
  CHECK(y.scalar_type() == at::kDouble);
  CHECK(y.device() == at::kCPU);
  CHECK(y.requires_grad());
  CHECK(at::tanh(half).scalar_type() == at::kHalf);
  {
    const at::NoGradGuard no_grad;
    CHECK_FALSE(at::tanh(y).requires_grad());
  }
  CHECK_FALSE(y.detach().requires_grad());
  CHECK(y.t().strides() == at::IntArrayRef({1, 3}));
  CHECK(is_pending(y));
  CHECK(scope.report().flushes.empty());
}

TEST_CASE("scope: grad mode is that of the capture, not of the flush", "[scope]") {
  const Tensors x = leaves(3, {4});
  Tensors with, without;
  {
    BatchScope scope;
    for (const Tensor& t : x) {
      with.push_back(at::tanh(t));
      const at::NoGradGuard no_grad;
      without.push_back(at::tanh(t));
    }
    const at::NoGradGuard no_grad;
    scope.flush();
  }
  for (size_t i = 0; i < x.size(); ++i) {
    CHECK(with[i].requires_grad());
    CHECK(with[i].grad_fn() != nullptr);
    CHECK_FALSE(without[i].requires_grad());
    CHECK(at::equal(with[i], without[i]));
  }
}

TEST_CASE("scope: a frozen model runs in the same number of batches", "[scope]") {
  const Tensors x = constants(6, {3});
  const Tensor w = constant({4, 3});
  const at::NoGradGuard no_grad;
  const Report report = check_program({}, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::tanh(at::linear(t, w)));
    return out;
  });
  CHECK(report.ops == 12);
  CHECK(report.batches == 2);
}

TEST_CASE("scope: ops that touch neither parameters nor pending tensors run at once", "[scope]") {
  BatchScope scope;
  const Tensor sum = at::ones({3}) + at::ones({3});
  CHECK(as_pending(sum) == nullptr);
  CHECK(scope.report().ops == 0);
}

// --- nesting, threads, lifetime ---

TEST_CASE("scope: a nested scope joins the outer one", "[scope]") {
  CHECK(Scope::current() == nullptr);
  const Tensors x = leaves(2, {3});
  Tensor a, b;
  {
    BatchScope outer;
    Scope* const open = Scope::current();
    REQUIRE(open != nullptr);
    a = at::tanh(x[0]);
    {
      BatchScope inner;
      CHECK(Scope::current() == open);
      b = at::tanh(x[1]);
      CHECK(&inner.report() == &outer.report());
    }
    CHECK(Scope::current() == open);
    CHECK(is_pending(a));
    CHECK(is_pending(b));
    outer.flush();
    CHECK(outer.report().ops == 2);
    CHECK(outer.report().batches == 1);
  }
  CHECK(Scope::current() == nullptr);
  check_same(Tensors{a, b}, Tensors{at::tanh(x[0]), at::tanh(x[1])});
}

TEST_CASE("scope: after the block tensors are ordinary and nothing is captured", "[scope]") {
  const Tensor x = leaf({3});
  Tensor y;
  {
    BatchScope scope;
    y = at::tanh(x);
    CHECK(y.key_set().has(compat::kDeferKey));
  }
  CHECK_FALSE(y.key_set().has(compat::kDeferKey));
  CHECK_FALSE(c10::impl::tls_is_dispatch_key_included(compat::kDeferKey));
  CHECK(as_pending(at::tanh(y)) == nullptr);
}

TEST_CASE("scope: every reference becomes the real tensor", "[scope]") {
  const Tensor x = leaf({3});
  Tensor y;
  Tensors list;
  std::function<Tensor()> closure;
  {
    BatchScope scope;
    y = at::tanh(x);
    list = {y, y};
    closure = [held = y] { return held; };
  }
  CHECK(list[0].is_same(y));
  CHECK(closure().is_same(y));
  CHECK(at::equal(closure(), at::tanh(x)));
}

TEST_CASE("scope: results have memory of their own", "[scope]") {
  const Tensors x = leaves(3, {4});
  Tensors y;
  {
    BatchScope scope;
    for (const Tensor& t : x) y.push_back(at::tanh(t));
  }
  CHECK(y[0].storage().nbytes() == 4 * sizeof(double));
  {
    const at::NoGradGuard no_grad;
    y[0].fill_(100);
  }
  check_same(y[1], at::tanh(x[1]));
  check_same(gradients(y[2].sum(), {x[2]})[0], 1 - at::tanh(x[2]).square());
}

TEST_CASE("scope: a thread without a scope is not captured", "[scope]") {
  const Tensor x = leaf({3});
  BatchScope scope;
  const Tensor mine = at::tanh(x);
  bool has_scope = true;
  Tensor theirs;
  std::thread([&] {
    has_scope = Scope::current() != nullptr;
    theirs = at::tanh(x);
  }).join();
  CHECK_FALSE(has_scope);
  CHECK(as_pending(theirs) == nullptr);
  CHECK(is_pending(mine));
  CHECK(scope.report().ops == 1);
  CHECK(at::equal(theirs, mine));
}

TEST_CASE("scope: threads with scopes of their own do not meet", "[scope]") {
  const Tensor w = leaf({4, 4});
  const Tensors x = constants(2, {4});
  std::vector<uint64_t> ops(2), batches(2);
  Tensors results(2);
  const auto work = [&](size_t thread) {
    BatchScope scope;
    Tensor h = x[thread];
    for (size_t i = 0; i < 50 * (thread + 1); ++i) h = at::tanh(at::linear(h, w));
    scope.flush();
    results[thread] = h;
    ops[thread] = scope.report().ops;
    batches[thread] = scope.report().batches;
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  for (size_t thread = 0; thread < 2; ++thread) {
    Tensor h = x[thread];
    for (size_t i = 0; i < 50 * (thread + 1); ++i) h = at::tanh(at::linear(h, w));
    check_same(results[thread], h);
    CHECK(ops[thread] == 100 * (thread + 1));
    CHECK(batches[thread] == 100 * (thread + 1));
  }
}

TEST_CASE("scope: a tensor that nobody holds is not computed", "[scope]") {
  const Tensors x = leaves(4, {3});
  Tensors kept;
  BatchScope scope;
  for (size_t i = 0; i < x.size(); ++i) {
    const Tensor h = at::tanh(x[i]);
    const Tensor unused = at::exp(h);
    if (i % 2 == 0) kept.push_back(at::sigmoid(h));
  }
  scope.flush();
  CHECK(scope.report().ops == 10);
  CHECK(scope.report().nodes == 4);  // tanh and sigmoid of the two that are kept
  CHECK(row_of(scope.report(), "aten::exp").instances == 0);
  check_same(kept, Tensors{at::sigmoid(at::tanh(x[0])), at::sigmoid(at::tanh(x[2]))});
}

TEST_CASE("scope: a view keeps what it is a view of", "[scope]") {
  const Tensor x = leaf({6});
  Tensor part;
  {
    BatchScope scope;
    part = at::tanh(x).narrow(0, 2, 3);
  }
  check_same(part, at::tanh(x).narrow(0, 2, 3));
  check_same(gradients(part.sum(), {x})[0], gradients(at::tanh(x).narrow(0, 2, 3).sum(), {x})[0]);
}

// --- reads and writes in between ---

TEST_CASE("scope: a raw read of the data flushes", "[scope]") {
  const Tensors x = leaves(2, {3});
  BatchScope scope;
  const Tensor a = at::tanh(x[0]);
  const Tensor b = at::tanh(x[1]);
  const auto* data = static_cast<const double*>(a.const_data_ptr());
  const auto* inputs = static_cast<const double*>(x[0].const_data_ptr());
  CHECK(std::abs(data[1] - std::tanh(inputs[1])) < 1e-12);
  CHECK_FALSE(is_pending(b));
  REQUIRE(scope.report().flushes.size() == 1);
  CHECK(scope.report().flushes[0].nodes == 2);
  CHECK_FALSE(scope.report().flushes[0].reason.empty());
  const Tensor c = at::exp(a);  // and capture goes on
  CHECK(is_pending(c));
  check_same(c, at::exp(at::tanh(x[0])));
}

TEST_CASE("scope: item() flushes, and says so", "[scope]") {
  const Tensor x = leaf({});
  BatchScope scope;
  const Tensor y = at::tanh(x);
  CHECK(std::abs(y.item<double>() - std::tanh(x.item<double>())) < 1e-12);
  CHECK(scope.report().flushes.size() == 1);
  REQUIRE(scope.report().at_once.size() == 1);
  CHECK_FALSE(scope.report().at_once[0].reason.empty());
}

TEST_CASE("scope: max_pending flushes a graph grown too large", "[scope]") {
  const Tensors x = leaves(10, {3});
  ScopeOptions options;
  options.max_pending = 4;
  Tensors out;
  BatchScope scope(options);
  for (const Tensor& t : x) out.push_back(at::tanh(t));
  CHECK(scope.report().flushes.size() == 2);
  scope.flush();
  CHECK(scope.report().batches == 3);
  for (size_t i = 0; i < x.size(); ++i) check_same(out[i], at::tanh(x[i]));
}

TEST_CASE("scope: a write to a parameter comes after what has read it", "[scope]") {
  const Tensor w = leaf({3, 3});
  const Tensor x = constant({3});
  const Tensor before = at::linear(x, w).detach();
  BatchScope scope;
  const Tensor old_value = at::linear(x, w);
  Tensor alias;
  SECTION("directly") {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  SECTION("through a view made before") {
    const at::NoGradGuard no_grad;
    w.detach()[0].add_(1);
  }
  SECTION("through .data") { w.data().mul_(3); }
  const Tensor new_value = at::linear(x, w);
  scope.flush();
  check_same(old_value, before);
  check_same(new_value, at::linear(x, w.detach()));
  CHECK_FALSE(at::allclose(new_value, before));
}

TEST_CASE("scope: memory that is not PyTorch's is copied at capture", "[scope]") {
  std::vector<double> buffer(3);
  const Tensor w = leaf({2, 3});
  Tensors ours, eager;
  const auto refill = [&](double value) {
    for (double& element : buffer) element = value;
    return at::from_blob(buffer.data(), {3}, at::kDouble);
  };
  for (int i = 0; i < 3; ++i) eager.push_back(at::linear(refill(i), w));
  {
    BatchScope scope;
    for (int i = 0; i < 3; ++i) ours.push_back(at::linear(refill(i), w));
  }
  check_same(ours, eager);
}

TEST_CASE("scope: views of strided memory that is not PyTorch's", "[scope]") {
  // The copy made at capture is row-major; views count in the strides of what was copied.
  std::vector<double> buffer = {1, 2, 3, 4, 5, 6};
  const Tensor x = at::from_blob(buffer.data(), {2, 3}, at::kDouble).t().requires_grad_(true);
  check_program({x},
                [&] { return Tensors{at::tanh(x.select(0, 1)), at::tanh(x.narrow(1, 1, 1))}; });
}

TEST_CASE("scope: views of a tensor that overlaps itself", "[scope]") {
  const Tensor windows = constant({6}).unfold(0, 3, 1).requires_grad_(true);
  check_program({windows},
                [&] { return Tensors{at::exp(windows.select(0, 1)), at::exp(windows)}; });
}

TEST_CASE("scope: a leaf whose rows overlap with gaps between", "[scope]") {
  const Tensor windows = constant({6, 8}).narrow(1, 0, 2).unfold(0, 3, 1).requires_grad_(true);
  check_program({windows}, [&] { return Tensors{at::exp(windows), windows * 2.0}; });
}

// --- errors ---

TEST_CASE("scope: a wrong shape raises where it is written, and the next block works", "[scope]") {
  const Tensor w = leaf({4, 3});
  const Tensor x = leaf({3});
  const Tensor y = leaf({4});
  const std::vector<std::function<Tensor()>> wrong = {
      [&] { return at::linear(y, w); },
      [&] { return at::tanh(x) + at::tanh(y); },
      [&] { return at::mm(w, w); },
      [&] { return at::cat({at::tanh(x), at::tanh(w)}); },
      [&] { return at::stack({at::tanh(x), at::tanh(y)}); },
      [&] { return at::tanh(x).view({2, 2}); },
      [&] { return at::tanh(x).select(0, 3); },
      [&] { return at::softmax(at::tanh(x), 1); },
      [&] { return at::sum(at::tanh(x), at::IntArrayRef{1}); },
      [&] { return at::chunk(at::tanh(x), 0)[0]; },
  };
  for (size_t i = 0; i < wrong.size(); ++i) {
    CAPTURE(i);
    Tensor before, after;
    try {
      BatchScope scope;
      before = at::tanh(at::linear(x, w));
      after = wrong[i]();
      FAIL_CHECK("a wrong shape was accepted");
    } catch (const c10::Error& error) {
      CHECK_FALSE(std::string(error.what_without_backtrace()).empty());
    }
    CHECK(Scope::current() == nullptr);
    CHECK_FALSE(after.defined());
    check_same(before, at::tanh(at::linear(x, w)));
    check_program({w, x}, [&] { return Tensors{at::tanh(at::linear(x, w))}; });
  }
}

TEST_CASE("scope: an error names the op and both shapes", "[scope]") {
  const Tensor w = leaf({4, 3});
  const Tensor x = leaf({5});
  BatchScope scope;
  const Tensor h = at::tanh(x);
  try {
    at::linear(h, w);
    FAIL_CHECK("a wrong shape was accepted");
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    CAPTURE(what);
    CHECK(what.find("aten::linear") != std::string::npos);
    CHECK(what.find("[5]") != std::string::npos);
    CHECK(what.find("[4, 3]") != std::string::npos);
  }
}

TEST_CASE("scope: an error in the block loses nothing that was captured before it", "[scope]") {
  const Tensor x = leaf({3});
  Tensor y;
  CHECK_THROWS_AS(
      [&] {
        BatchScope scope;
        y = at::tanh(x);
        throw std::runtime_error("the user's own");
      }(),
      std::runtime_error);
  CHECK(Scope::current() == nullptr);
  check_same(y, at::tanh(x));
}

TEST_CASE("scope: an op that fails in the flush", "[scope]") {
  const Tensor w = leaf({4, 3});
  Tensor good, bad, after_bad;
  {
    BatchScope scope;
    good = at::embedding(w, at::tensor({0, 3}, at::kLong));
    scope.flush();
    bad = at::embedding(w, at::tensor({1, 4}, at::kLong));  // there are 4 rows
    after_bad = at::tanh(bad);
    CHECK_THROWS(scope.flush());
  }
  check_same(good, at::embedding(w, at::tensor({0, 3}, at::kLong)));
  CHECK_THROWS_AS(at::exp(bad), c10::Error);
  CHECK_THROWS_AS(after_bad.const_data_ptr(), c10::Error);
  check_program({w}, [&] { return Tensors{at::embedding(w, at::tensor({0, 3}, at::kLong))}; });
}

TEST_CASE("scope: an unknown policy is refused", "[scope]") {
  ScopeOptions options;
  options.policy = "fastest";
  CHECK_THROWS_AS(BatchScope(options), std::invalid_argument);
  CHECK(Scope::current() == nullptr);
}

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
  // The gradients accumulated in the parameters since the last call.
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
  losses[1].backward();  // another instance is another graph
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

// --- where DyNet merges what must not be merged ---

// Programs of one op each, in one scope instance by instance, then each kind in a scope of its own
// (signatures outlive scopes), then in the other order.
void check_apart(const Tensors& inputs, std::vector<std::function<Tensor(const Tensor&)>> ops) {
  const auto apply = [&](const auto& op) {
    Tensors out;
    for (const Tensor& x : inputs) out.push_back(op(at::tanh(x)));
    return out;
  };
  for (int order = 0; order < 2; ++order) {
    CAPTURE(order);
    check_program(inputs, [&] {
      Tensors out;
      for (const auto& op : ops) {
        for (const Tensor& value : apply(op)) out.push_back(value);
      }
      return out;
    });
    for (size_t i = 0; i < ops.size(); ++i) {
      CAPTURE(i);
      check_program(inputs, [&] { return apply(ops[i]); });
    }
    std::reverse(ops.begin(), ops.end());
  }
}

TEST_CASE("scope: relu, elu and silu stay apart", "[scope][dynet]") {
  check_apart(
      leaves(3, {6}),
      {[](const Tensor& x) { return at::relu(x); }, [](const Tensor& x) { return at::elu(x); },
       [](const Tensor& x) { return at::silu(x); }, [](const Tensor& x) { return at::gelu(x); }});
}

TEST_CASE("scope: parameters of an activation keep it apart", "[scope][dynet]") {
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::elu(x, 1.0); },
                               [](const Tensor& x) { return at::elu(x, 0.5); },
                               [](const Tensor& x) { return at::elu(x, 1.0, 2.0); },
                               [](const Tensor& x) { return at::elu(x, 1.0, 1.0, 2.0); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::leaky_relu(x, 0.1); },
                               [](const Tensor& x) { return at::leaky_relu(x, 0.2); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::gelu(x, "none"); },
                               [](const Tensor& x) { return at::gelu(x, "tanh"); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::hardtanh(x, -0.1, 0.2); },
                               [](const Tensor& x) { return at::hardtanh(x, -0.2, 0.2); }});
}

TEST_CASE("scope: softmax over different axes", "[scope][dynet]") {
  const auto over = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::softmax(x, dim); };
  };
  const auto log_over = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::log_softmax(x, dim); };
  };
  check_apart(leaves(3, {3, 3, 3}), {over(0), over(1), over(2), over(-2)});
  check_apart(leaves(3, {4, 4}), {log_over(0), log_over(1), log_over(-1), log_over(-2)});
}

TEST_CASE("scope: softmax of vectors and of matrices of the same width", "[scope][dynet]") {
  check_apart({leaf({4, 3})}, {[](const Tensor& x) { return at::softmax(x[0], 0); },
                               [](const Tensor& x) { return at::softmax(x, 1); },
                               [](const Tensor& x) { return at::softmax(x.unsqueeze(0), -1); }});
}

TEST_CASE("scope: cat and stack over different axes", "[scope][dynet]") {
  const auto cat = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::cat({x, x * 2.0}, dim); };
  };
  const auto stack = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::stack({x, x * 2.0, x}, dim); };
  };
  check_apart(leaves(3, {4, 4}), {cat(0), cat(1), cat(-1), cat(-2)});
  check_apart(leaves(3, {4, 4}), {stack(0), stack(1), stack(2), stack(-1)});
}

TEST_CASE("scope: cat of vectors and of matrices, over the last axis", "[scope][dynet]") {
  check_apart({leaf({4, 3}), leaf({2, 3})},
              {[](const Tensor& x) { return at::cat({x[0], x[1]}, -1); },
               [](const Tensor& x) { return at::cat({x, x}, -1); },
               [](const Tensor& x) { return at::cat({x[0], x[1]}, 0); },
               [](const Tensor& x) { return at::cat({x, x}, 0); }});
}

TEST_CASE("scope: cat of any number of pieces is one batch", "[scope]") {
  const Tensors x = leaves(6, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (size_t i = 1; i <= x.size(); ++i) {
      out.push_back(at::cat(Tensors(x.begin(), x.begin() + static_cast<int64_t>(i))));
    }
    return out;
  });
  CHECK(row_of(report, "aten::cat").batches == 1);
}

TEST_CASE("scope: picks of different places, over different axes", "[scope][dynet]") {
  const auto pick = [](int64_t dim, int64_t i) {
    return [dim, i](const Tensor& x) { return at::exp(x.select(dim, i)); };
  };
  check_apart(leaves(3, {3, 3}), {pick(0, 0), pick(0, 2), pick(1, 0), pick(1, 2)});
}

TEST_CASE("scope: an index that is data does not split a batch", "[scope]") {
  const Tensors x = leaves(4, {5, 3});
  const Tensor w = leaf({7, 3});
  const Report report = check_program(joined({x, {w}}), [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::exp(at::tanh(x[i])[static_cast<int64_t>(i)]));
      out.push_back(at::embedding(w, at::full({2}, static_cast<int64_t>(i), at::kLong)));
    }
    return out;
  });
  CHECK(row_of(report, "aten::exp").batches == 1);
  CHECK(row_of(report, "aten::embedding").batches == 1);
}

TEST_CASE("scope: reductions over different axes, with and without keepdim", "[scope][dynet]") {
  const auto sum = [](std::vector<int64_t> dims, bool keepdim) {
    return [=](const Tensor& x) { return at::sum(x, dims, keepdim); };
  };
  const auto mean = [](std::vector<int64_t> dims, bool keepdim) {
    return [=](const Tensor& x) { return at::mean(x, dims, keepdim); };
  };
  check_apart(leaves(3, {3, 3, 3}),
              {sum({0}, false), sum({1}, false), sum({2}, false), sum({0}, true), sum({1}, true),
               sum({0, 1}, false), sum({0, 2}, false), sum({-1, -2}, false), sum({0, 1, 2}, true)});
  check_apart(leaves(3, {3, 3}), {mean({0}, false), mean({1}, false), mean({0}, true),
                                  mean({1}, true), mean({0, 1}, false), mean({-2}, false)});
}

TEST_CASE("scope: constants are part of a signature by value and by kind", "[scope][dynet]") {
  const auto times = [](at::Scalar s) { return [s](const Tensor& x) { return x * s; }; };
  const auto over = [](at::Scalar s) { return [s](const Tensor& x) { return x / s; }; };
  check_apart(leaves(3, {6}), {times(1.5), times(2.5), times(2), times(-2.5), times(true)});
  check_apart(leaves(3, {6}), {over(0.0), over(-0.0)});  // inf of either sign
  check_apart(leaves(3, {6}),
              {[](const Tensor& x) { return x + 1.0; }, [](const Tensor& x) { return x + 2.0; },
               [](const Tensor& x) { return x - 1.0; }, [](const Tensor& x) { return 1.0 - x; },
               [](const Tensor& x) { return at::add(x, 1.0, 3.0); },
               [](const Tensor& x) { return at::sub(x, 1.0, 3.0); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::add(x, x); },
                               [](const Tensor& x) { return at::add(x, x, 0.5); },
                               [](const Tensor& x) { return at::sub(x, x, 0.5); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::pow(x, 2); },
                               [](const Tensor& x) { return at::pow(x, 3); },
                               [](const Tensor& x) { return at::pow(x, 0); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::clamp(x, -0.5, 0.5); },
                               [](const Tensor& x) { return at::clamp(x, -0.2, 0.5); }});
}

TEST_CASE("scope: a number on either side", "[scope][dynet]") {
  const Tensor two = c10::scalar_to_tensor(2.0);
  two.unsafeGetTensorImpl()->set_wrapped_number(true);  // as Python's numbers arrive
  const Tensor three = c10::scalar_to_tensor(3.0);
  three.unsafeGetTensorImpl()->set_wrapped_number(true);
  check_apart(leaves(3, {6}), {[&](const Tensor& x) { return at::div(x, two); },
                               [&](const Tensor& x) { return at::div(two, x); },
                               [&](const Tensor& x) { return at::div(three, x); },
                               [&](const Tensor& x) { return at::sub(x, three); },
                               [&](const Tensor& x) { return at::sub(three, x); }});
}

TEST_CASE("scope: dtypes stay apart", "[scope]") {
  const Tensors x = leaves(4, {3});
  const Tensors y = {at::randn({3}).requires_grad_(true), at::randn({3}).requires_grad_(true)};
  const Report report = check_program(joined({x, y}), [&] {
    Tensors out;
    for (const Tensor& t : joined({x, y})) out.push_back(at::sigmoid(t).to(at::kDouble));
    return out;
  });
  CHECK(row_of(report, "aten::sigmoid").batches == 2);
}

TEST_CASE("scope: a weight that a batched op produced gets its gradient", "[scope][dynet]") {
  const Tensor p = leaf({4, 3}), q = leaf({4, 3}), b = leaf({4});
  const Tensors x = leaves(5, {3});
  const Tensors rows = leaves(5, {2, 3});
  const Report report = check_program(joined({{p, q, b}, x, rows}), [&] {
    Tensors out;
    const Tensor w = at::tanh(p);  // one batch with the next
    const Tensor u = at::tanh(q);
    const Tensor bias = at::tanh(b);
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::linear(x[i], w, bias));
      out.push_back(at::mv(u, x[i]));
      out.push_back(at::mm(rows[i], w.t()));
      out.push_back(at::matmul(at::tanh(rows[i]), u.t()));
    }
    return out;
  });
  CHECK(row_of(report, "aten::linear").batches == 1);
  CHECK(row_of(report, "aten::mv").batches == 1);
  CHECK(row_of(report, "aten::mm").batches == 1);
}

TEST_CASE("scope: a shared argument that is not the first member's", "[scope][dynet]") {
  const Tensors x = leaves(5, {3}), own = leaves(5, {3});
  const Tensor shared = leaf({3});
  const size_t odd = GENERATE(0, 2, 4);  // the one that has an argument of its own
  check_program(joined({x, own, {shared}}), [&] {
    Tensors out;
    const Tensor s = at::sigmoid(shared);
    for (size_t i = 0; i < x.size(); ++i) {
      const Tensor& outside = i == odd ? own[i] : shared;
      const Tensor computed = i == odd ? at::sigmoid(own[i]) : s;
      out.push_back(at::tanh(x[i]) * outside);
      out.push_back(at::tanh(x[i]) / computed);
      out.push_back(outside - at::tanh(x[i]));
    }
    return out;
  });
}

TEST_CASE("scope: one argument shared by all, of a smaller shape", "[scope]") {
  const Tensors x = leaves(4, {2, 3});
  const Tensor row = leaf({3}), one = leaf({}), column = leaf({2, 1});
  const Report report = check_program(joined({x, {row, one, column}}), [&] {
    Tensors out;
    for (const Tensor& t : x) {
      out.push_back(at::tanh(t) * row);
      out.push_back(one / (at::tanh(t) + 2.0));
      out.push_back(at::tanh(t) - column);
    }
    return out;
  });
  CHECK(row_of(report, "aten::mul.Tensor").batches == 1);
  CHECK(row_of(report, "aten::div.Tensor").batches == 1);
  CHECK(row_of(report, "aten::sub.Tensor").batches == 1);
}

TEST_CASE("scope: operands whose lengths differ, and repeat along the rows", "[scope]") {
  Tensors x;
  for (const int64_t rows : {2, 5, 1}) x.push_back(leaf({rows, 3}));
  const Tensors row = leaves(3, {3});
  const Tensor shared = leaf({3});
  check_program(joined({x, row, {shared}}), [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::tanh(x[i]) * at::tanh(row[i]));
      out.push_back(at::tanh(row[i]) - at::tanh(x[i]));
      out.push_back(at::tanh(x[i]) + shared);
    }
    return out;
  });
}

TEST_CASE("scope: one value used by all instances gets the sum of their gradients", "[scope]") {
  const Tensor x = leaf({3});
  const Tensors y = leaves(4, {3});
  check_program(joined({{x}, y}), [&] {
    const Tensor h = at::tanh(x);
    Tensors out;
    for (const Tensor& t : y) out.push_back(h * at::tanh(h * t) + h);
    return out;
  });
}

TEST_CASE("scope: ops without a native rule", "[scope]") {
  const Tensors x = leaves(4, {3, 3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(t);
      out.push_back(at::cumsum(h, 1));
      out.push_back(at::tril(h));
      out.push_back(at::atan2(h, t));
      out.push_back(std::get<0>(at::max(h, 1)));
    }
    return out;
  });
  for (const char* op : {"aten::cumsum", "aten::tril", "aten::atan2", "aten::max.dim"}) {
    CAPTURE(op);
    CHECK(row_of(report, op).instances == 4);
    CHECK(row_of(report, op).batches == 1);
  }
}

TEST_CASE("scope: an op whose Meta kernel only Python registers", "[scope]") {
  const Tensors x = leaves(4, {3, 3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::logsumexp(at::tanh(t), at::IntArrayRef{0}));
    return out;
  });
  CHECK(report.flushes.size() == 1);
  CHECK(row_of(report, "aten::logsumexp").batches == 1);
}

TEST_CASE("scope: empty instances among others", "[scope]") {
  Tensors x;
  for (const int64_t rows : {2, 0, 3}) x.push_back(leaf({rows, 3}));
  const Tensor w = leaf({4, 3});
  check_program(joined({x, {w}}), [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(at::linear(at::tanh(t), w));
      out.push_back(h * 2.0);
      out.push_back(at::sum(h, at::IntArrayRef{0}));
    }
    return out;
  });
}

TEST_CASE("scope: the same program in many scopes", "[scope]") {
  // What is interned lives on; weights' numbers and the constants kept with signatures must not.
  const Tensors x = constants(3, {3});
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    const Tensors w = leaves(3, {3, 3});
    const Report report = check_program(w, [&] {
      Tensors out;
      for (size_t i = 0; i < x.size(); ++i) {
        Tensor h = x[i];
        for (size_t layer = 0; layer < w.size(); ++layer) {
          h = at::tanh(at::linear(h, w[(layer + static_cast<size_t>(step)) % w.size()]));
        }
        out.push_back(h);
      }
      return out;
    });
    CHECK(report.batches == 6);
  }
}

TEST_CASE("scope: the report is text for people", "[scope]") {
  const Tensors x = leaves(3, {4});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::tanh(t));
    return out;
  });
  const std::string text = report.to_string();
  CAPTURE(text);
  CHECK(text.find("aten::tanh") != std::string::npos);
  CHECK(text.find("lower bound") != std::string::npos);
  CHECK(text.find("[4]") != std::string::npos);
}

}  // namespace
}  // namespace autobatch

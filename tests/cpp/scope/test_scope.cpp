#include "scope_test.h"

namespace autobatch {
namespace {

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
  const std::string policy = GENERATE("auto", "agenda", "frontier", "depth");
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

TEST_CASE("scope: ops that read neither parameters nor pending tensors run eagerly", "[scope]") {
  const Tensors x = constants(2, {3});
  BatchScope scope;
  const Tensor sum = x[0] + x[1];
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
  CHECK(scope.report().nodes == 4);  // tanh and sigmoid of the two tensors that are kept
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

}  // namespace
}  // namespace autobatch

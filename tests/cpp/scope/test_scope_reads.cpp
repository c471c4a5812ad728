#include "scope_test.h"

namespace autobatch {
namespace {

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
  const Tensor c = at::exp(a);  // capture goes on
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
  // The copy made at capture is row-major. The offsets of views follow from the original strides.
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
    bad = at::embedding(w, at::tensor({1, 4}, at::kLong));  // w has 4 rows
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

}  // namespace
}  // namespace autobatch

// autobatch::map, which runs instances in fibers of Boost.Context.
#include "autobatch/autobatch.h"
#include "scope_test.h"

namespace autobatch {
namespace {

// Runs a test's body only where there are fibers.
#define NEEDS_MAP()                                                      \
  if (!has_map()) {                                                      \
    WARN("built without Boost.Context: autobatch::map can't be tested"); \
    return;                                                              \
  }

// A loop whose length and branches depend on values.
Tensor walk(const Tensor& start, const Tensor& w) {
  Tensor x = start, total = at::zeros({}, at::kDouble);
  for (int step = 0; step < 6; ++step) {
    x = at::tanh(at::mv(w, x));
    total = total + x.pow(2).sum();
    if (x.sum().item<double>() > 0.7) break;
    if (x[0].item<double>() > 0) x = x * 2;
  }
  return total;
}

TEST_CASE("map: a stack that is too small is refused", "[map]") {
  NEEDS_MAP();
  MapOptions options;
  options.stack_size = 4096;
  CHECK_THROWS_WITH(
      for_each_instance(1, [](size_t) {}, options), ContainsSubstring("stack_size is 4096 bytes"));
  options.stack_size = 1u << 14;
  int runs = 0;
  for_each_instance(2, [&](size_t) { ++runs; }, options);
  CHECK(runs == 2);
}

TEST_CASE("map gives the loop's values and gradients") {
  NEEDS_MAP();
  at::manual_seed(0);
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(9, {4});
  Tensors expected;
  for (const Tensor& start : starts) expected.push_back(walk(start, w));
  at::stack(expected).sum().backward();
  const Tensor gradient = w.grad().clone();
  w.mutable_grad().reset();

  const Tensors results = map(starts.size(), [&](size_t i) { return walk(starts[i], w); });
  REQUIRE(results.size() == expected.size());
  for (size_t i = 0; i < results.size(); ++i) CHECK(at::allclose(results[i], expected[i]));
  at::stack(results).sum().backward();
  CHECK(at::allclose(w.grad(), gradient));
}

TEST_CASE("reads of all instances are served by one flush") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(16, {4});
  BatchScope scope;
  const auto signs = map(starts.size(), [&](size_t i) {
    const Tensor h = at::tanh(at::mv(w, starts[i]));
    const bool first = h.sum().item<double>() > 0;
    return first == (at::mv(w, h).sum().item<double>() > 0);
  });
  CHECK(signs.size() == 16);
  CHECK(scope.report().num_flushes == 2);
  for (const SignatureReport& row : scope.report().signatures) CHECK(row.largest == 16);
}

TEST_CASE("map joins the scope that is open") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(3, {4});
  BatchScope scope;
  const Tensors results = map(3, [&](size_t i) { return at::mv(w, starts[i]); });
  for (const Tensor& result : results) CHECK(is_pending(result));
}

TEST_CASE("maps nest, and their reads are served together") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(12, {4});
  const auto inner = [&](size_t i) { return at::mv(w, starts[i]).sum().item<double>(); };
  BatchScope scope;
  const auto sums =
      map(4, [&](size_t k) { return map(3, [&](size_t j) { return inner(3 * k + j); }); });
  CHECK(scope.report().num_flushes == 1);
  scope.flush();
  for (size_t k = 0; k < 4; ++k) {
    for (size_t j = 0; j < 3; ++j) {
      CHECK(std::abs(sums[k][j] - at::mv(w, starts[3 * k + j]).sum().item<double>()) < 1e-9);
    }
  }
}

TEST_CASE("a mode that one instance sets is not another's") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(4, {4});
  const auto recorded = map(4, [&](size_t i) {
    std::optional<at::NoGradGuard> none;
    if (i % 2 == 1) none.emplace();
    const Tensor h = at::mv(w, starts[i]);
    h.sum().item<double>();
    const bool enabled = c10::GradMode::is_enabled();
    const Tensor g = at::mv(w, h);
    g.sum().item<double>();
    none.reset();
    return std::pair(enabled, g.requires_grad());
  });
  for (size_t i = 0; i < 4; ++i) CHECK(recorded[i] == std::pair(i % 2 == 0, i % 2 == 0));
  CHECK(c10::GradMode::is_enabled());
}

TEST_CASE("the exception is that of the first instance that fails") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(6, {4});
  std::vector<int> destroyed(6, 0);
  struct Mark {
    int& count;
    ~Mark() { ++count; }
  };
  const auto body = [&](size_t i) {
    const Mark mark{destroyed[i]};
    for (size_t step = 0; step < 8 - i; ++step) at::mv(w, starts[i]).sum().item<double>();
    if (i == 2 || i == 5) throw std::runtime_error("number " + std::to_string(i));
  };
  CHECK_THROWS_WITH(map(6, body), "number 2");
  CHECK(destroyed == std::vector<int>(6, 1));
  CHECK(Scope::current() == nullptr);
}

TEST_CASE("an error of PyTorch's names its instance") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(6, {4});
  const auto body = [&](size_t i) {
    at::mv(w, i == 3 ? starts[i].narrow(0, 0, 2) : starts[i]).sum().item<double>();
  };
  CHECK_THROWS_WITH(map(6, body), ContainsSubstring("in instance 3 of autobatch::map"));
}

TEST_CASE("exceptions that are being handled are each instance's own") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(5, {4});
  const auto names = map(5, [&](size_t i) {
    try {
      throw std::runtime_error(std::to_string(i));
    } catch (const std::exception&) {
      at::mv(w, starts[i]).sum().item<double>();
      try {
        throw;
      } catch (const std::exception& again) {
        return std::string(again.what());
      }
    }
  });
  CHECK(names == std::vector<std::string>{"0", "1", "2", "3", "4"});
}

TEST_CASE("max_live bounds how many are under way") {
  NEEDS_MAP();
  const Tensor w = leaf({4, 4});
  const Tensors starts = constants(20, {4});
  size_t live = 0, most = 0;
  MapOptions options;
  options.max_live = 3;
  map(
      20,
      [&](size_t i) {
        most = std::max(most, ++live);
        for (size_t step = 0; step < i % 4; ++step) at::mv(w, starts[i]).sum().item<double>();
        --live;
      },
      options);
  CHECK(most == 3);
}

TEST_CASE("without Boost.Context map says what is missing") {
  if (has_map()) return;
  CHECK_THROWS_WITH(map(1, [](size_t) {}), ContainsSubstring("libboost-context-dev"));
}

}  // namespace
}  // namespace autobatch

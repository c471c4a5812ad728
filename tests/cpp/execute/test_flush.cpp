#include "scope_test.h"

#include <c10/core/CPUAllocator.h>

namespace autobatch {
namespace {

Tensor index(int64_t i) { return at::tensor({i}, at::kLong); }

// --- ops that fail ---

TEST_CASE("execute: one member fails, the others of its batch do not", "[execute]") {
  const Tensor w = leaf({4, 3});
  const int64_t bad = GENERATE(0, 3, 6);
  Tensors rows, sums;
  {
    BatchScope scope;
    for (int64_t i = 0; i < 7; ++i) {
      rows.push_back(at::embedding(w, index(i == bad ? 9 : i % 4)));
      sums.push_back(at::tanh(rows.back()).sum());
    }
    CHECK_THROWS_WITH(scope.flush(), ContainsSubstring("aten::embedding"));
    CHECK(row_of(scope.report(), "aten::embedding").instances == 6);
    CHECK(row_of(scope.report(), "aten::tanh").instances == 6);
  }
  for (int64_t i = 0; i < 7; ++i) {
    CAPTURE(i);
    const auto k = static_cast<size_t>(i);
    if (i == bad) {
      CHECK_THROWS_AS(rows[k] + 1, c10::Error);
      CHECK_THROWS_AS(sums[k].item(), c10::Error);
      continue;
    }
    const Tensor eager = at::embedding(w, index(i % 4));
    check_same(rows[k], eager);
    check_same(gradients(sums[k], {w}), gradients(at::tanh(eager).sum(), {w}));
  }
}

TEST_CASE("execute: of several errors the one captured first is raised", "[execute]") {
  const Tensor w = leaf({4, 3}), v = leaf({5, 2});
  const bool first_is_deep = GENERATE(true, false);
  BatchScope scope;
  Tensor deep, flat;
  const auto make_deep = [&] {
    deep = at::embedding(w, at::tensor({9.0}, at::kDouble).add(w[0][0].detach() * 0).to(at::kLong));
  };
  if (first_is_deep) make_deep();
  flat = at::embedding(v, index(7));
  if (!first_is_deep) make_deep();
  CHECK_THROWS_WITH(scope.flush(), ContainsSubstring(first_is_deep ? "[4, 3]" : "[5, 2]"));
  // An op on a lost value reports the error that lost it.
  CHECK_THROWS_WITH(deep + 1, ContainsSubstring("[4, 3]"));
  CHECK_THROWS_WITH(flat + 1, ContainsSubstring("[5, 2]"));
}

TEST_CASE("execute: a value that depends on nothing that failed is computed", "[execute]") {
  const Tensor w = leaf({4, 3});
  const Tensor x = leaf({3});
  Tensor before, beside, after, lost;
  {
    BatchScope scope;
    before = at::tanh(x);
    const Tensor bad = at::embedding(w, index(4));
    beside = at::exp(before);
    lost = bad[0] + before;
    after = beside.sum() * before;
    CHECK_THROWS(scope.flush());
    CHECK_THROWS_AS(lost.const_data_ptr(), c10::Error);
    const Tensor more = at::exp(after);  // the scope stays usable
    scope.flush();
    check_same(more, at::exp(after));
  }
  const Tensor eager = at::exp(at::tanh(x)).sum() * at::tanh(x);
  check_same(after, eager);
  check_same(gradients(after.sum(), {x}), gradients(eager.sum(), {x}));
}

TEST_CASE("execute: a lost value that was written to, and views of it", "[execute]") {
  const Tensor w = leaf({4, 3});
  Tensor sum = at::zeros({}, at::kDouble), part, filled;
  {
    BatchScope scope;
    sum = at::zeros({3}, at::kDouble);
    filled = at::zeros({2, 3}, at::kDouble);
    part = filled[1];
    sum.add_(at::embedding(w, index(9))[0]);
    filled[0].copy_(at::embedding(w, index(1))[0]);
    CHECK_THROWS(scope.flush());
  }
  CHECK_THROWS_AS(sum + 1, c10::Error);
  check_same(filled, at::stack({w[1], at::zeros({3}, at::kDouble)}));
  check_same(part, at::zeros({3}, at::kDouble));
}

TEST_CASE("execute: a block ended by an error drops that of its flush", "[execute]") {
  const Tensor w = leaf({4, 3});
  Tensor bad, good;
  CHECK_THROWS_WITH(
      [&] {
        BatchScope scope;
        bad = at::embedding(w, index(9));
        good = at::embedding(w, index(1));
        throw std::runtime_error("the user's own");
      }(),
      "the user's own");
  CHECK(Scope::current() == nullptr);
  CHECK_THROWS_AS(bad + 1, c10::Error);
  check_same(good, at::embedding(w, index(1)));
}

TEST_CASE("execute: an interruption stops the flush immediately and is raised", "[execute]") {
  struct Interrupted {
    Interrupted() {
      HostHooks hooks;
      hooks.interrupts = [](const std::exception&) { return true; };
      set_host_hooks(std::move(hooks));
    }
    ~Interrupted() { set_host_hooks({}); }
  };
  const Tensor w = leaf({4, 3});
  Tensors rows;
  Tensor after;
  {
    BatchScope scope;
    for (int64_t i = 0; i < 8; ++i) rows.push_back(at::embedding(w, index(i == 5 ? 9 : 0)));
    after = at::exp(rows[0]);
    const Interrupted hooks;
    CHECK_THROWS_AS(scope.flush(), c10::Error);
    CHECK(row_of(scope.report(), "aten::exp").instances == 0);
  }
  for (const Tensor& row : rows) CHECK_THROWS_AS(row + 1, c10::Error);
  CHECK_THROWS_AS(after + 1, c10::Error);
}

// --- memory that runs out ---

// Wraps PyTorch's CPU allocator and can refuse requests. The only instance is never destroyed,
// since storages keep a pointer to their allocator.
class Scarce final : public c10::Allocator {
 public:
  static Scarce& instance() {
    static auto* scarce = [] {
      auto* made = new Scarce();
      c10::SetCPUAllocator(made, 1);
      return made;
    }();
    return *scarce;
  }

  void refuse_nth(int64_t nth) { left_ = nth, refused_ = false; }
  void refuse_above(size_t bytes) { most_ = bytes, refused_ = false; }
  void refuse_nothing() { left_ = 0, most_ = std::numeric_limits<size_t>::max(); }
  bool refused() const { return refused_; }

  c10::DataPtr allocate(size_t bytes) override {
    const bool refuse = bytes > most_ || (left_ > 0 && --left_ == 0);
    refused_ = refused_ || refuse;
    TORCH_CHECK(!refuse, "no memory for ", bytes, " bytes");
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  Scarce() : inner_(c10::GetCPUAllocator()) {}

  c10::Allocator* inner_;
  int64_t left_ = 0;
  size_t most_ = std::numeric_limits<size_t>::max();
  bool refused_ = false;
};

// Flushes the scope. Returns whether that failed.
bool flush_fails(BatchScope& scope) {
  try {
    scope.flush();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

Tensor kept_gradient(const Tensor& value, const Tensor& x) {
  return torch::autograd::grad({value.sum()}, {x}, {}, /*retain_graph=*/true)[0];
}

TEST_CASE("execute: where a batch is too large, smaller ones are tried", "[execute]") {
  const Tensors x = leaves(8, {16, 4, 4});
  Tensors ours;
  BatchScope scope;
  for (const Tensor& each : x) ours.push_back(at::amax(each, 0));
  // There is memory for the results and for copies of a few members' operands, but not for all
  // copies.
  Scarce& memory = Scarce::instance();
  memory.refuse_above(x[0].nbytes() * 3);
  const bool failed = flush_fails(scope);
  CHECK(memory.refused());
  memory.refuse_nothing();
  CHECK_FALSE(failed);
  CHECK(row_of(scope.report(), "aten::amax").instances == 8);
  for (size_t i = 0; i < ours.size(); ++i) check_same(ours[i], at::amax(x[i], 0));
}

// Refuses the n-th allocation, for every n. Each value must then be eager's value or be lost with
// an error.
TEST_CASE("execute: any allocation of a flush may fail", "[execute]") {
  const Tensors x = leaves(4, {3});
  const Tensor w = leaf({3, 3});
  const auto program = [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(at::linear(t, w));
      Tensor rows = at::zeros({2, 3}, at::kDouble);
      rows[0].copy_(h);
      out.insert(out.end(), {h, h.narrow(0, 1, 2), rows, at::exp(h).sum()});
    }
    return out;
  };
  const Tensors eager = program();
  Scarce& memory = Scarce::instance();
  const bool read = GENERATE(false, true);
  size_t lost = 0;
  for (int64_t nth = 1;; ++nth) {
    CAPTURE(nth, read);
    REQUIRE(nth < 1000);
    Tensors ours;
    bool raised = false;
    {
      BatchScope scope;
      ours = program();
      memory.refuse_nth(nth);
      try {
        if (read) (void)ours[1].const_data_ptr();
      } catch (const c10::Error&) {
        raised = true;
      }
      raised = flush_fails(scope) || raised;
      memory.refuse_nothing();
    }
    CHECK(Scope::current() == nullptr);
    for (size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      if (const PendingTensor* pending = as_pending(ours[i])) {
        ++lost;
        CHECK(raised);
        CHECK(pending->is_lost());
        CHECK_THROWS_AS(ours[i] + 1, c10::Error);
      } else {
        check_same(ours[i], eager[i]);
        check_same(kept_gradient(ours[i], x[i / 4]), kept_gradient(eager[i], x[i / 4]));
      }
    }
    if (!memory.refused()) break;
  }
  CHECK(lost > 0);
}

}  // namespace
}  // namespace autobatch

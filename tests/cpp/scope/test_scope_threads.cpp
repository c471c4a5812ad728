#include "scope_test.h"

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace autobatch {
namespace {

// Orders the steps of several threads: `reach(n)` lets `await(n)` return.
class Turns {
 public:
  void reach(int turn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    turn_ = std::max(turn_, turn);
    changed_.notify_all();
  }
  void await(int turn) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return turn_ >= turn; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int turn_ = 0;
};

TEST_CASE("threads: another thread reads what is pending here", "[threads]") {
  const Tensors x = leaves(3, {3});
  BatchScope scope;
  Tensors h;
  for (const Tensor& t : x) h.push_back(at::tanh(t));
  const Tensor rest = at::exp(h[0]);
  double read = 0;
  std::thread([&] { read = h[1].sum().item<double>(); }).join();
  CHECK(read == Approx(at::tanh(x[1]).sum().item<double>()));
  for (const Tensor& t : h) CHECK_FALSE(is_pending(t));
  CHECK(is_pending(rest));
  CHECK(is_pending(at::exp(h[1])));  // capture goes on in this thread
  scope.flush();
  check_same(rest, at::exp(at::tanh(x[0])));
}

TEST_CASE("threads: another thread's op on what is pending here", "[threads]") {
  const Tensor x = leaf({3});
  Tensor theirs, in_scope;
  BatchScope scope;
  const Tensor mine = at::tanh(x);
  SECTION("without a scope") {
    std::thread([&] { theirs = mine * 2; }).join();
  }
  SECTION("in a scope of its own") {
    std::thread([&] {
      BatchScope other;
      theirs = mine * 2;
    }).join();
  }
  CHECK_FALSE(is_pending(theirs));
  check_same(theirs, at::tanh(x) * 2);
  theirs.sum().backward();
  check_same(x.grad(), 2 * (1 - at::tanh(x).square()).detach());
}

TEST_CASE("threads: many read while the owner captures", "[threads]") {
  constexpr int kRounds = 40;
  const Tensors x = constants(kRounds, {4});
  const Tensor w = leaf({4, 4});
  Tensors values(kRounds), seen(2 * kRounds);
  Turns captured;
  {
    BatchScope scope;
    const auto read = [&](size_t reader) {
      for (int i = 0; i < kRounds; ++i) {
        captured.await(i + 1);
        const auto k = static_cast<size_t>(i);
        seen[2 * k + reader] = values[k].sum().detach();
      }
    };
    std::thread first(read, 0), second(read, 1);
    Tensor h = x[0];
    for (int i = 0; i < kRounds; ++i) {
      const auto k = static_cast<size_t>(i);
      h = at::tanh(at::linear(h + x[k], w));
      values[k] = h;
      captured.reach(i + 1);
    }
    first.join();
    second.join();
  }
  Tensor h = x[0];
  for (int i = 0; i < kRounds; ++i) {
    CAPTURE(i);
    const auto k = static_cast<size_t>(i);
    h = at::tanh(at::linear(h + x[k], w));
    check_same(values[k], h);
    check_same(seen[2 * k], h.sum().detach());
    check_same(seen[2 * k + 1], h.sum().detach());
  }
}

TEST_CASE("threads: a lock keeps others out, and may be taken twice by its holder", "[threads]") {
  const Tensor x = leaf({3});
  BatchScope scope;
  const Tensor h = at::tanh(x);
  Turns turns;
  std::atomic<bool> read = false;
  std::thread other([&] {
    turns.await(1);
    read = h.sum().item<double>() != 0;
    turns.reach(2);
  });
  {
    Scope::Lock lock(*Scope::current());
    Scope::Lock again(*Scope::current());
    again.release();
    again.release();  // does nothing
    turns.reach(1);
    CHECK_FALSE(read);
    CHECK(is_pending(h));
    scope.flush();  // the holder of the lock may flush; from now on `h` can be read
    CHECK_FALSE(is_pending(h));
  }
  turns.await(2);
  other.join();
  CHECK(read);
}

TEST_CASE("threads: waiting for the lock goes through the host's hook", "[threads]") {
  const Tensor x = leaf({3});
  Turns turns;
  int waits = 0;
  HostHooks hooks;
  hooks.wait = [&](const std::function<void()>& lock) {
    ++waits;
    turns.reach(1);
    lock();
  };
  set_host_hooks(hooks);
  double sum = 0;
  {
    BatchScope scope;
    const Tensor h = at::tanh(x);
    std::optional<Scope::Lock> lock(std::in_place, *Scope::current());
    std::thread other([&] { sum = h.sum().item<double>(); });
    turns.await(1);
    lock.reset();
    other.join();
  }
  set_host_hooks({});
  CHECK(waits == 1);
  CHECK(sum == Approx(at::tanh(x).sum().item<double>()));
}

TEST_CASE("threads: a scope is closed where it was opened", "[threads]") {
  BatchScope scope;
  Scope* const open = Scope::current();
  std::string what;
  std::thread([&] {
    try {
      open->check_thread();
    } catch (const c10::Error& error) {
      what = error.what_without_backtrace();
    }
  }).join();
  CHECK(what.find("on the thread that opened it") != std::string::npos);
  CHECK(Scope::current() == open);
}

TEST_CASE("threads: tensors that outlive their scope and its thread", "[threads]") {
  const Tensor x = leaf({3});
  Tensor y;
  std::thread([&] {
    BatchScope scope;
    y = at::tanh(x);
  }).join();
  check_same(y, at::tanh(x));
  check_same(gradients(y.sum(), {x}), gradients(at::tanh(x).sum(), {x}));
}

TEST_CASE("threads: tensors die on another thread before a flush and a read", "[threads]") {
  const Tensors x = leaves(6, {3});
  BatchScope scope;
  Tensors h, deep;
  for (const Tensor& t : x) h.push_back(at::tanh(t));
  for (const Tensor& t : h) deep.push_back(at::exp(t));
  std::thread([&] {
    deep[0].reset(), deep[3].reset();
    h[3].reset();
  }).join();
  (void)h[0].const_data_ptr();
  std::thread([&] { deep[1].reset(); }).join();
  scope.flush();
  CHECK(row_of(scope.report(), "aten::tanh").instances == 5);
  CHECK(row_of(scope.report(), "aten::exp").instances == 3);
  for (const size_t i : {2, 4, 5}) check_same(deep[i], at::exp(at::tanh(x[i])));
}

TEST_CASE("threads: backward on another thread", "[threads]") {
  const Tensors x = leaves(3, {3});
  Tensors losses;
  const auto program = [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::tanh(t).square().sum());
    return out;
  };
  Tensors ours, eager = gradients(at::stack(program()).sum(), x);
  BatchScope scope;
  losses = program();
  std::thread([&] { ours = gradients(at::stack(losses).sum(), x); }).join();
  check_same(ours, eager);
}

}  // namespace
}  // namespace autobatch

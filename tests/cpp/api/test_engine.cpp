// autobatch::Engine: requests from many threads in one batch, and requests that fail, expire or are
// cancelled.
#include "autobatch/autobatch.h"
#include "scope_test.h"

#include <atomic>
#include <thread>

namespace autobatch {
namespace {

using namespace std::chrono_literals;

#define NEEDS_ENGINE()                                                      \
  if (!has_map()) {                                                         \
    WARN("built without Boost.Context: autobatch::Engine can't be tested"); \
    return;                                                                 \
  }

struct Model {
  Tensor w = leaf({4, 4});
  Tensor table = leaf({10, 4});

  // Runs a number of steps that depends on values.
  std::pair<int, Tensor> walk(int first, int most) const {
    Tensor h = at::embedding(table, at::full({}, first, at::kLong));
    int steps = 0;
    for (; steps < most; ++steps) {
      h = at::tanh(at::mv(w, h));
      if (h.sum().item<double>() > 1.5) break;
    }
    return {steps, h};
  }
  // Reads no value.
  Tensor line(int first, int length) const {
    Tensor h = at::embedding(table, at::full({}, first, at::kLong));
    for (int i = 0; i < length; ++i) h = at::tanh(at::mv(w, h));
    return h;
  }
  // Reads values until `stop` is set.
  void wait_for(const std::atomic<bool>& stop) const {
    while (!stop) at::mv(w, table[0]).sum().item<double>();
  }
};

TEST_CASE("engine: requests of many threads get eager's results", "[engine]") {
  NEEDS_ENGINE();
  at::manual_seed(0);
  const Model model;
  Engine engine;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::vector<EngineFuture<std::pair<int, Tensor>>> walks;
      std::vector<EngineFuture<Tensor>> lines;
      for (int i = 0; i < 40; ++i) {
        walks.push_back(engine.submit([&model, i, t] { return model.walk(i % 10, 1 + t + i); }));
        lines.push_back(engine.submit([&model, i, t] { return model.line(i % 10, 1 + t + i); }));
      }
      const at::NoGradGuard no_grad;
      for (int i = 0; i < 40; ++i) {
        const auto [steps, h] = walks[static_cast<size_t>(i)].get();
        const auto [wanted_steps, wanted] = model.walk(i % 10, 1 + t + i);
        const Tensor line = lines[static_cast<size_t>(i)].get();
        const bool is_same = steps == wanted_steps && at::allclose(h, wanted) &&
                             at::allclose(line, model.line(i % 10, 1 + t + i));
        if (!is_same || is_pending(h) || is_pending(line)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  const EngineStats stats = engine.stats();
  CHECK(stats.finished == 640);
  CHECK(stats.live + stats.queued + stats.failed == 0);
  CHECK(stats.ops > 2 * stats.batches);  // they were batched
}

TEST_CASE("engine: a failure stays with its request", "[engine]") {
  NEEDS_ENGINE();
  const Model model;
  Engine engine;
  std::vector<EngineFuture<Tensor>> good, thrown, out_of_range;
  for (int i = 0; i < 30; ++i) {
    good.push_back(engine.submit([&, i] { return model.line(i % 10, 5); }));
    if (i % 5 == 0) {
      thrown.push_back(engine.submit([&]() -> Tensor { throw std::out_of_range("mine"); }));
      out_of_range.push_back(engine.submit([&] { return model.line(99, 5); }));
    }
  }
  for (auto& future : thrown) CHECK_THROWS_AS(future.get(), std::out_of_range);
  for (auto& future : out_of_range) CHECK_THROWS_WITH(future.get(), ContainsSubstring("embedding"));
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < good.size(); ++i) {
    check_same(good[i].get().clone(), model.line(static_cast<int>(i) % 10, 5));
  }
  CHECK(engine.stats().failed == 12);
  CHECK(engine.stats().finished == 30);
}

TEST_CASE("engine: a cancelled request ends where it stands", "[engine]") {
  NEEDS_ENGINE();
  const Model model;
  EngineOptions options;
  options.max_live = 1;
  Engine engine(options);
  const std::atomic<bool> never = false;
  std::atomic<bool> runs = false, destroyed = false;
  struct Note {
    std::atomic<bool>& destroyed;
    ~Note() { destroyed = true; }
  };
  auto running = engine.submit([&] {
    const Note note{destroyed};
    runs = true;
    model.wait_for(never);
  });
  auto waiting = engine.submit([&] { return model.line(1, 2); });
  auto last = engine.submit([&] { return model.line(2, 2); });
  while (!runs) std::this_thread::yield();
  waiting.cancel();
  CHECK_THROWS_AS(waiting.get(), RequestCancelled);
  running.cancel();
  CHECK_THROWS_AS(running.get(), RequestCancelled);
  CHECK(destroyed);
  CHECK(last.get().defined());
  last.cancel();  // no error after the request has finished
  CHECK(engine.stats().cancelled == 2);
}

TEST_CASE("engine: a request ends when its time is over", "[engine]") {
  NEEDS_ENGINE();
  const Model model;
  Engine engine;
  const std::atomic<bool> never = false;
  RequestOptions soon;
  soon.timeout = 20ms;
  auto late = engine.submit([&] { model.wait_for(never); }, soon);
  CHECK_THROWS_AS(late.get(), RequestTimedOut);
  CHECK(engine.stats().timed_out == 1);
}

TEST_CASE("engine: a full queue refuses, and priorities go first", "[engine]") {
  NEEDS_ENGINE();
  const Model model;
  EngineOptions options;
  options.max_live = 1;
  options.max_queue = 2;
  Engine engine(options);
  std::atomic<bool> stop = false, runs = false;
  auto first = engine.submit([&] {
    runs = true;
    model.wait_for(stop);
  });
  while (!runs) std::this_thread::yield();
  std::vector<int> order;  // filled on the engine's thread
  RequestOptions urgent;
  urgent.priority = 1;
  auto second = engine.submit([&] { order.push_back(2); });
  auto third = engine.submit([&] { order.push_back(3); }, urgent);
  CHECK_THROWS_AS(engine.submit([] {}), QueueFull);
  stop = true;
  for (auto* future : {&first, &second, &third}) future->get();
  CHECK(order == std::vector<int>{3, 2});
  CHECK(engine.stats().rejected == 1);
}

TEST_CASE("engine: shutdown drains, or cancels", "[engine]") {
  NEEDS_ENGINE();
  const Model model;
  Engine engine;
  std::vector<EngineFuture<Tensor>> futures;
  SECTION("drains") {
    for (int i = 0; i < 50; ++i)
      futures.push_back(engine.submit([&] { return model.line(1, 20); }));
    engine.shutdown();
    for (auto& future : futures) CHECK(future.get().numel() == 4);
    CHECK(engine.stats().finished == 50);
  }
  SECTION("cancels") {
    const std::atomic<bool> never = false;
    auto endless = engine.submit([&] { model.wait_for(never); });
    engine.shutdown(/*cancel=*/true);
    CHECK_THROWS_AS(endless.get(), RequestCancelled);
  }
  CHECK_THROWS_WITH(engine.submit([] {}), ContainsSubstring("shut down"));
}

TEST_CASE("engine: weights change between requests", "[engine]") {
  NEEDS_ENGINE();
  Model model;
  Engine engine;
  const auto run = [&] { return model.line(3, 30); };
  const at::NoGradGuard no_grad;
  const Tensor before = run();
  std::vector<EngineFuture<Tensor>> old, fresh;
  for (int i = 0; i < 10; ++i) old.push_back(engine.submit(run));
  old.front().wait();
  std::atomic<uint64_t> live = 1;
  auto changed = engine.between([&] {
    live = engine.stats().live;
    const at::NoGradGuard quiet;
    model.w.mul_(0.5);
  });
  changed.get();
  for (int i = 0; i < 10; ++i) fresh.push_back(engine.submit(run));
  const Tensor after = run();
  CHECK(live == 0);
  for (auto& future : fresh) check_same(future.get().clone(), after);
  for (auto& future : old) {
    const Tensor got = future.get().clone();
    CHECK((at::allclose(got, before) || at::allclose(got, after)));
  }
  auto failing = engine.between([] { throw std::logic_error("mine"); });
  CHECK_THROWS_AS(failing.get(), std::logic_error);
}

TEST_CASE("engine: gradients where they are asked for, and results in callbacks", "[engine]") {
  NEEDS_ENGINE();
  const Model model;
  EngineOptions options;
  options.grad = true;
  Engine engine(options);
  const Tensor result = engine.submit([&] { return model.line(1, 3); }).get();
  const Tensor eager = model.line(1, 3);
  check_same(gradients(loss_of({result}), {model.w})[0], gradients(loss_of({eager}), {model.w})[0]);
  std::promise<bool> told;
  engine.post([] {}, [&](const std::exception_ptr& error) { told.set_value(error == nullptr); });
  CHECK(told.get_future().get());
}

TEST_CASE("engine: options that make no sense are refused", "[engine]") {
  NEEDS_ENGINE();
  EngineOptions options;
  options.stack_size = 100;
  CHECK_THROWS_WITH(Engine(options), ContainsSubstring("stack_size is 100 bytes"));
  options = {};
  options.max_live = 0;
  CHECK_THROWS_WITH(Engine(options), ContainsSubstring("max_live is 0"));
}

}  // namespace
}  // namespace autobatch

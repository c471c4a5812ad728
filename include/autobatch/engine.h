// Requests that come at any time, from any thread, share batches op by op (Python has ab.Engine).
//
//   autobatch::Engine engine;
//   auto answer = engine.submit([&] { return model->forward(tree); });  // from any thread
//   torch::Tensor result = answer.get();
//
// One thread runs all requests, each in a fiber, as `map` runs instances. What they capture runs in
// slices of about a millisecond. Between two slices requests that have come start, those whose
// values are there go on, and those that are ready leave. Experimental: may change between minor
// versions.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace autobatch {

struct EngineOptions {
  double max_live = 256;  // requests under way at a time, or the sum of their costs; one always is
  double max_queue = 1024;                // requests, or costs, that wait to be started
  std::chrono::nanoseconds max_delay{0};  // that the first request of an idle engine waits for more
  std::chrono::nanoseconds slice_time{
      1'000'000};                // that a slice is to take; a batch may take longer
  bool grad = false;             // record gradients; else requests run in inference mode
  size_t stack_size = 1u << 20;  // bytes of address space for each live request, at least 16 KiB
};

struct RequestOptions {
  std::optional<std::chrono::nanoseconds> timeout;  // from now, after which the request ends
  int priority = 0;                                 // a higher one starts before others that wait
  double cost = 1;                                  // tokens, nodes: what the limits count
};

// Thrown by `submit`: max_queue requests wait already.
class AUTOBATCH_API QueueFull : public std::runtime_error {
 public:
  QueueFull(double queued, double limit);
  double queued, limit;  // requests, or costs
};
// A future has it: the request was cancelled, by its future or by Engine::shutdown.
class AUTOBATCH_API RequestCancelled : public std::runtime_error {
 public:
  explicit RequestCancelled(uint64_t number);
};
// A future has it: the request's time was over.
class AUTOBATCH_API RequestTimedOut : public std::runtime_error {
 public:
  explicit RequestTimedOut(uint64_t number);
};

struct EngineStats {
  size_t live = 0, queued = 0;  // requests now
  uint64_t submitted = 0, rejected = 0, finished = 0, failed = 0, cancelled = 0, timed_out = 0;
  uint64_t slices = 0;
  uint64_t ops = 0, batches = 0;  // that were run; their quotient is the mean width of a batch
};

class EngineLoop;

namespace engine_detail {

AUTOBATCH_API void cancel(const std::weak_ptr<EngineLoop>& loop, uint64_t number);
// In a request: waits until the tensors are ordinary ones.
AUTOBATCH_API void make_real(const std::vector<at::Tensor>& tensors);

// The tensors in a result. Those in types that are not named here are not looked for.
template <class T>
void find_tensors(const T& value, std::vector<at::Tensor>& found);

template <class T>
struct Finder {
  static void find(const T& value, std::vector<at::Tensor>& found) {
    if constexpr (std::is_base_of_v<at::Tensor, T>) found.push_back(value);
  }
};
template <class T>
struct Finder<std::optional<T>> {
  static void find(const std::optional<T>& value, std::vector<at::Tensor>& found) {
    if (value.has_value()) find_tensors(*value, found);
  }
};
template <class T>
struct Finder<std::vector<T>> {
  static void find(const std::vector<T>& values, std::vector<at::Tensor>& found) {
    for (const auto& value : values) find_tensors(value, found);
  }
};
template <class T, size_t kSize>
struct Finder<std::array<T, kSize>> {
  static void find(const std::array<T, kSize>& values, std::vector<at::Tensor>& found) {
    for (const auto& value : values) find_tensors(value, found);
  }
};
template <class... T>
struct Finder<std::tuple<T...>> {
  static void find(const std::tuple<T...>& values, std::vector<at::Tensor>& found) {
    std::apply([&](const auto&... value) { (find_tensors(value, found), ...); }, values);
  }
};
template <class A, class B>
struct Finder<std::pair<A, B>> {
  static void find(const std::pair<A, B>& values, std::vector<at::Tensor>& found) {
    find_tensors(values.first, found);
    find_tensors(values.second, found);
  }
};

template <class T>
void find_tensors(const T& value, std::vector<at::Tensor>& found) {
  Finder<T>::find(value, found);
}

// A call, its result, and whom it is promised to.
template <class F, class R>
struct Call {
  explicit Call(F given) : function(std::move(given)) {}

  void run() {
    if constexpr (std::is_void_v<R>) {
      function();
    } else {
      result.emplace(function());
      std::vector<at::Tensor> tensors;
      find_tensors(*result, tensors);
      make_real(tensors);
    }
  }
  void tell(const std::exception_ptr& error) {
    if (error) {
      promise.set_exception(error);
    } else if constexpr (std::is_void_v<R>) {
      promise.set_value();
    } else {
      promise.set_value(*std::move(result));
    }
  }

  F function;
  std::promise<R> promise;
  std::conditional_t<std::is_void_v<R>, char, std::optional<R>> result{};
};

}  // namespace engine_detail

// The result of a request: a std::future that can be cancelled. To let it go cancels nothing.
template <class R>
class EngineFuture : public std::future<R> {
 public:
  EngineFuture(std::future<R> future, std::weak_ptr<EngineLoop> loop, uint64_t number)
      : std::future<R>(std::move(future)), loop_(std::move(loop)), number_(number) {}

  // Ends the request where it stands, at the next slice, unless it has ended. From any thread.
  void cancel() { engine_detail::cancel(loop_, number_); }

 private:
  std::weak_ptr<EngineLoop> loop_;
  uint64_t number_;
};

class Engine {
 public:
  // Throws if a limit is below 1, a time below 0, stack_size too small, or the library was built
  // without Boost.Context (has_map()).
  AUTOBATCH_API explicit Engine(const EngineOptions& options = {});
  // shutdown().
  AUTOBATCH_API ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Has `function()`, the code for one request, run on the engine's thread; from any thread, at
  // once. It may read values and call any number of models; it must wait for nothing else. Tensors
  // that it uses must not be written to meanwhile. Tensors in its result, also those in pairs,
  // tuples, arrays, vectors and optionals, are ordinary ones, with eager's values. What it throws
  // is the future's alone. Throws QueueFull, or std::runtime_error after a shutdown.
  template <class F>
  auto submit(F&& function, const RequestOptions& options = {}) {
    using Function = std::decay_t<F>;
    using R = std::invoke_result_t<Function&>;
    const auto call = std::make_shared<engine_detail::Call<Function, R>>(std::forward<F>(function));
    std::future<R> future = call->promise.get_future();
    const uint64_t number =
        post([call] { call->run(); },
             [call](const std::exception_ptr& error) { call->tell(error); }, options);
    return EngineFuture<R>(std::move(future), loop_, number);
  }

  // The same for who is told in another way than by a future: `ended` is called once, on the
  // engine's thread, with what ended the request (null: it finished), and must not wait or throw.
  // Gives the number for `cancel`.
  AUTOBATCH_API uint64_t post(std::function<void()> function,
                              std::function<void(const std::exception_ptr&)> ended,
                              const RequestOptions& options = {});
  AUTOBATCH_API void cancel(uint64_t number);

  // Has `action` called on the engine's thread while no request is under way: to load other
  // weights. Requests that have started finish first; those that wait start after it. The future
  // has what it throws.
  AUTOBATCH_API std::future<void> between(std::function<void()> action);

  // No more requests are taken; returns once all have finished. `cancel`: they end where they
  // stand.
  AUTOBATCH_API void shutdown(bool cancel = false);

  AUTOBATCH_API EngineStats stats() const;

 private:
  std::shared_ptr<EngineLoop> loop_;
};

}  // namespace autobatch

// An Engine serves requests that arrive at any time and from any thread (in Python: ab.Engine). Ops
// of different requests are batched together.
//
//   autobatch::Engine engine;
//   auto answer = engine.submit([&] { return model->forward(tree); });  // from any thread
//   torch::Tensor result = answer.get();
//
// One thread runs all requests. Each request runs in a fiber, like an instance of `map`. Captured
// ops run in slices of about a millisecond. Between two slices, new requests start, requests whose
// values are computed resume, and finished requests deliver their results. The Engine is
// experimental, and its interface may change between minor versions.
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
  // Limit on the total cost of the requests that have started and have not ended. A request may
  // exceed the limit if no other request is running.
  double max_live = 256;
  // Limit on the total cost of the requests in the queue.
  double max_queue = 1024;
  // An idle engine that receives a request waits for this time for further requests.
  std::chrono::nanoseconds max_delay{0};
  // Target duration of a slice. A single batch may take longer.
  std::chrono::nanoseconds slice_time{1'000'000};
  bool grad = false;             // record gradients; if false, requests run in inference mode
  size_t stack_size = 1u << 20;  // bytes of address space for each started request, at least 16 KiB
};

struct RequestOptions {
  std::optional<std::chrono::nanoseconds> timeout;  // time limit from submission to end
  int priority = 0;                                 // requests with higher priority start first
  double cost = 1;  // size of the request, in the unit of max_live and max_queue
};

// Thrown by `submit` and `post` when the request exceeds EngineOptions::max_queue.
class AUTOBATCH_API QueueFull : public std::runtime_error {
 public:
  QueueFull(double queued, double limit);
  double queued, limit;  // cost of the queued requests, and max_queue
};
// Thrown by the EngineFuture of a cancelled request. A request is cancelled by
// EngineFuture::cancel, Engine::cancel or Engine::shutdown.
class AUTOBATCH_API RequestCancelled : public std::runtime_error {
 public:
  explicit RequestCancelled(uint64_t number);
};
// Thrown by the EngineFuture of a request that took longer than RequestOptions::timeout.
class AUTOBATCH_API RequestTimedOut : public std::runtime_error {
 public:
  explicit RequestTimedOut(uint64_t number);
};

struct EngineStats {
  size_t live = 0, queued = 0;  // current numbers of running and of queued requests
  uint64_t submitted = 0, rejected = 0, finished = 0, failed = 0, cancelled = 0, timed_out = 0;
  uint64_t slices = 0;
  uint64_t ops = 0, batches = 0;  // ops and batches that ran; ops / batches is the mean batch size
};

class EngineLoop;

namespace engine_detail {

AUTOBATCH_API void cancel(const std::weak_ptr<EngineLoop>& loop, uint64_t number);
// Waits until the values of the tensors are computed. Must be called inside a request.
AUTOBATCH_API void make_real(const std::vector<at::Tensor>& tensors);

// Finds the tensors that `value` contains, and appends them to `found`. If a type has no Finder,
// tensors inside values of this type are not found.
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

// The function of a request, its result, and the promise for the result.
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

// The future of a request. EngineFuture is a std::future with an additional member, cancel().
// Destroying the future does not cancel the request.
template <class R>
class EngineFuture : public std::future<R> {
 public:
  EngineFuture(std::future<R> future, std::weak_ptr<EngineLoop> loop, uint64_t number)
      : std::future<R>(std::move(future)), loop_(std::move(loop)), number_(number) {}

  // Ends the request at the next slice. Has no effect if the request has already ended. Can be
  // called from any thread.
  void cancel() { engine_detail::cancel(loop_, number_); }

 private:
  std::weak_ptr<EngineLoop> loop_;
  uint64_t number_;
};

class Engine {
 public:
  // Throws c10::Error if an option is not valid. max_live and max_queue must be at least 1, and
  // stack_size must be at least 16 KiB. max_delay must not be negative, and slice_time must be
  // positive. Also throws c10::Error if the library was built without Boost.Context (has_map()).
  AUTOBATCH_API explicit Engine(const EngineOptions& options = {});
  // Calls shutdown(), which waits until all requests have finished.
  AUTOBATCH_API ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Submits a request and returns immediately. The engine's thread will call `function()`, the code
  // of the request. submit() can be called from any thread. The function may read tensor values and
  // call any number of models. The function must not block, for example on a lock. Until the
  // function ends, no code may write to the tensors that the function uses. Tensors in the
  // function's result, including those in pairs, tuples, arrays, vectors and optionals, are
  // ordinary tensors with the values of eager mode. If the function throws an exception, the future
  // throws this exception, and other requests are not affected. submit() throws QueueFull if the
  // queue is full, and std::runtime_error after shutdown().
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

  // Submits a request like submit(), but reports the end of the request by a callback. `ended` is
  // called once, on the engine's thread. The argument of `ended` is the exception that ended the
  // request, or null if the request finished. `ended` must not block or throw. post() returns the
  // number of the request, which can be passed to cancel().
  AUTOBATCH_API uint64_t post(std::function<void()> function,
                              std::function<void(const std::exception_ptr&)> ended,
                              const RequestOptions& options = {});
  // Ends the request with this number at the next slice. Has no effect if the request has already
  // ended. Can be called from any thread.
  AUTOBATCH_API void cancel(uint64_t number);

  // Calls `action` on the engine's thread while no request is running, for example to load other
  // weights. Requests that have started finish first, and queued requests start after the action.
  // If `action` throws an exception, the returned future throws this exception. Throws
  // std::runtime_error after shutdown().
  AUTOBATCH_API std::future<void> between(std::function<void()> action);

  // Stops accepting requests, and waits until all accepted requests have finished. If `cancel` is
  // true, the accepted requests are cancelled instead. shutdown() does not wait if it is called on
  // the engine's thread.
  AUTOBATCH_API void shutdown(bool cancel = false);

  // Returns the current counts. Can be called from any thread.
  AUTOBATCH_API EngineStats stats() const;

 private:
  std::shared_ptr<EngineLoop> loop_;
};

}  // namespace autobatch

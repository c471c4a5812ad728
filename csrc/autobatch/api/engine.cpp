// The thread of an Engine. The thread starts requests, runs slices, and reports when requests end.
#include "autobatch/engine.h"

#include "autobatch/autobatch.h"
#include "autobatch/capture/capture.h"
#include "autobatch/fibers/stack_fiber.h"
#include "autobatch/graph/pending_tensor.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

namespace autobatch {
namespace {

using Clock = std::chrono::steady_clock;
using Ended = std::function<void(const std::exception_ptr&)>;

constexpr std::chrono::seconds kIdle{1};  // idle time after which cached memory is freed
constexpr int kTurns = 4;  // a turn has time to start 1/kTurns of the queued requests

struct Request {
  uint64_t number = 0;
  std::function<void()> function;
  Ended ended;
  RequestOptions options;
  Clock::time_point submitted;

  // Sort key of the queue: requests start in this order.
  std::pair<int64_t, uint64_t> place() const { return {-int64_t{options.priority}, number}; }
};

using RequestPtr = std::shared_ptr<Request>;

// Collects the fibers that have ended by themselves.
class RequestPool final : public StackFiberPool {
 public:
  RequestPool(Scope& scope, size_t stack_size)
      : StackFiberPool(scope, 0), stack_size_(stack_size) {}

  void add(const RequestPtr& request) {
    start(make_stack_fiber(*this, request->number, request->function, stack_size_));
  }
  // For each ended request: its number, and its exception (null if it did not fail).
  std::vector<std::pair<uint64_t, std::exception_ptr>> ends;

 private:
  std::unique_ptr<Fiber> next() override { return nullptr; }
  void ended(StackFiber& fiber) override { ends.emplace_back(fiber.index(), fiber.error); }

  size_t stack_size_;
};

// Disables capture while the object exists, because callbacks may run any code.
class Uncaptured {
 public:
  Uncaptured() : before_(set_eager(true)) {}
  ~Uncaptured() { set_eager(before_); }
  Uncaptured(const Uncaptured&) = delete;
  Uncaptured& operator=(const Uncaptured&) = delete;

 private:
  bool before_;
};

std::string describe(double queued, double limit) {
  std::ostringstream text;
  text << "the engine's queue is full: " << queued << " requests wait, and max_queue=" << limit
       << ". Try again later, increase max_queue, or start another engine";
  return text.str();
}

}  // namespace

QueueFull::QueueFull(double queued, double limit)
    : std::runtime_error(describe(queued, limit)), queued(queued), limit(limit) {}
RequestCancelled::RequestCancelled(uint64_t number)
    : std::runtime_error("request " + std::to_string(number) + " was cancelled") {}
RequestTimedOut::RequestTimedOut(uint64_t number)
    : std::runtime_error("request " + std::to_string(number) + " timed out") {}

// Members that `mutex_` protects are marked. Only the engine's thread uses the other members.
class EngineLoop {
 public:
  explicit EngineLoop(const EngineOptions& options) : options_(options) {}

  static void start(const std::shared_ptr<EngineLoop>& loop) {
    loop->thread_ = std::thread([loop] { loop->run(); });
  }

  uint64_t put(std::function<void()> function, Ended ended, const RequestOptions& options) {
    const auto request = std::make_shared<Request>();
    request->function = std::move(function);
    request->ended = std::move(ended);
    request->options = options;
    request->submitted = Clock::now();
    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("autobatch::Engine was shut down");
    if (queue_cost_ + options.cost > options_.max_queue && !queue_.empty()) {
      ++stats_.rejected;
      throw QueueFull(queue_cost_, options_.max_queue);
    }
    request->number = ++stats_.submitted;
    queue_.emplace(request->place(), request);
    queue_cost_ += options.cost;
    if (options.timeout) deadlines_.emplace(request->submitted + *options.timeout, request);
    news_.notify_all();
    return request->number;
  }

  void cancel(uint64_t number) {
    const std::lock_guard lock(mutex_);
    to_cancel_.push_back(number);
    news_.notify_all();
  }

  std::future<void> between(std::function<void()> action) {
    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("autobatch::Engine was shut down");
    std::future<void> done = between_.emplace_back(std::move(action)).get_future();
    news_.notify_all();
    return done;
  }

  void shutdown(bool cancel) {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      cancels_all_ = cancels_all_ || cancel;
      news_.notify_all();
    }
    // If a request or a callback calls shutdown(), the engine's thread cannot wait for itself to
    // end.
    if (std::this_thread::get_id() == thread_.get_id()) return;
    const std::lock_guard joining(join_mutex_);
    if (thread_.joinable()) thread_.join();
  }

  // Detaches the engine's thread, so that the engine can be destroyed on its own thread. The thread
  // then ends by itself.
  void detach() {
    const std::lock_guard joining(join_mutex_);
    if (thread_.joinable()) thread_.detach();
  }

  EngineStats stats() const {
    const std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.queued = queue_.size();
    return stats;
  }

 private:
  void run() {
    try {
      std::optional<c10::InferenceMode> inference;
      if (!options_.grad) inference.emplace();
      BatchScope scope;
      RequestPool pool(*Scope::current(), options_.stack_size);
      scope_ = &scope;
      pool_ = &pool;
      while (turn()) {
      }
    } catch (...) {
      fail_all(std::current_exception());
    }
  }

  // One iteration of the loop. Returns false if the engine is shut down and has no work left.
  bool turn() {
    end_cancelled();
    end_late();
    if (!run_between()) admit();
    deliver();
    if (!live_.empty()) {
      pool_->serve_slice(options_.slice_time);
      count_slice();
      deliver();
      return true;
    }
    scope_->flush();
    return rest();
  }

  void count_slice() {
    const Report& report = scope_->report();
    const std::lock_guard lock(mutex_);
    ++stats_.slices;
    stats_.ops = report.nodes;
    stats_.batches = report.batches;
  }

  // --- start requests ---

  // Starts queued requests for about the duration of a slice. Because of this time limit, running
  // requests do not wait long.
  void admit() {
    const auto began = Clock::now();
    const std::chrono::nanoseconds each = start_time_;
    auto now = began;
    auto until = began + options_.slice_time;
    int started = 0;
    while (now <= until) {
      const RequestPtr request = take();
      if (request == nullptr) break;
      live_.emplace(request->number, request);
      live_cost_ += request->options.cost;
      pool_->add(request);
      if (started++ == 0) until = std::max(until, began + each * (num_waiting() / kTurns));
      now = Clock::now();
    }
    if (started > 0) start_time_ += ((now - began) / started - start_time_) / 8;
  }

  int64_t num_waiting() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(queue_.size());
  }

  // If the next request may start now, removes it from the queue and returns it. Otherwise returns
  // null.
  RequestPtr take() {
    const std::lock_guard lock(mutex_);
    if (!may_start()) return nullptr;
    RequestPtr request = queue_.begin()->second;
    queue_.erase(queue_.begin());
    queue_cost_ = queue_.empty() ? 0 : queue_cost_ - request->options.cost;
    ++stats_.live;
    return request;
  }

  // The caller must hold `mutex_`.
  bool may_start() const {
    if (queue_.empty() || !between_.empty()) return false;
    const double cost = queue_.begin()->second->options.cost;
    if (!live_.empty()) return live_cost_ + cost <= options_.max_live;
    return closing_ || queue_cost_ >= options_.max_live || Clock::now() >= end_of_delay();
  }

  // The caller must hold `mutex_`.
  Clock::time_point end_of_delay() const {
    Clock::time_point first = Clock::time_point::max();
    if (options_.max_delay.count() == 0) return Clock::time_point::min();
    for (const auto& [place, request] : queue_) first = std::min(first, request->submitted);
    return first + options_.max_delay;
  }

  // --- end requests ---

  void deliver() {
    for (auto& [number, error] : std::exchange(pool_->ends, {})) {
      const auto found = live_.find(number);
      if (found == live_.end()) continue;
      tell(forget(found), error, error ? &EngineStats::failed : &EngineStats::finished);
    }
  }

  using Live = std::map<uint64_t, RequestPtr>;

  RequestPtr forget(Live::iterator found) {
    RequestPtr request = std::move(found->second);
    live_.erase(found);
    live_cost_ = live_.empty() ? 0 : live_cost_ - request->options.cost;
    const std::lock_guard lock(mutex_);
    --stats_.live;
    return request;
  }

  void tell(const RequestPtr& request, const std::exception_ptr& error,
            uint64_t EngineStats::* counter) {
    {
      const std::lock_guard lock(mutex_);
      ++(stats_.*counter);
    }
    const Uncaptured uncaptured;
    request->function = nullptr;
    std::exchange(request->ended, nullptr)(error);
  }

  // Ends a running or queued request with `Error`. Does nothing if the request has already ended.
  template <class Error>
  void end(uint64_t number, uint64_t EngineStats::* counter) {
    RequestPtr request;
    if (const auto found = live_.find(number); found != live_.end()) {
      request = forget(found);
      pool_->end_one(number);
    } else {
      const std::lock_guard lock(mutex_);
      const auto queued = std::ranges::find_if(
          queue_, [number](const auto& entry) { return entry.second->number == number; });
      if (queued == queue_.end()) return;
      request = queued->second;
      queue_.erase(queued);
      queue_cost_ = queue_.empty() ? 0 : queue_cost_ - request->options.cost;
    }
    tell(request, std::make_exception_ptr(Error(number)), counter);
  }

  void end_cancelled() {
    std::vector<uint64_t> numbers;
    {
      const std::lock_guard lock(mutex_);
      numbers = std::exchange(to_cancel_, {});
      if (cancels_all_) {
        for (const auto& [number, request] : live_) numbers.push_back(number);
        for (const auto& [place, request] : queue_) numbers.push_back(request->number);
      }
    }
    for (const uint64_t number : numbers) end<RequestCancelled>(number, &EngineStats::cancelled);
  }

  void end_late() {
    const auto now = Clock::now();
    std::vector<uint64_t> numbers;
    {
      const std::lock_guard lock(mutex_);
      drop_ended_deadlines();
      while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
        if (const RequestPtr late = deadlines_.begin()->second.lock()) {
          numbers.push_back(late->number);
        }
        deadlines_.erase(deadlines_.begin());
      }
    }
    for (const uint64_t number : numbers) end<RequestTimedOut>(number, &EngineStats::timed_out);
  }

  // If there are far more deadlines than requests, removes the deadlines of ended requests.
  // The caller must hold `mutex_`.
  void drop_ended_deadlines() {
    if (deadlines_.size() <= 2 * (live_.size() + queue_.size()) + 1024) return;
    std::erase_if(deadlines_, [](const auto& entry) { return entry.second.expired(); });
  }

  void fail_all(const std::exception_ptr& error) {
    std::vector<RequestPtr> all;
    // Actions that will never run. When the actions are destroyed, their futures get the error
    // broken_promise.
    std::deque<std::packaged_task<void()>> actions;
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      for (const auto& [number, request] : live_) all.push_back(request);
      for (const auto& [place, request] : queue_) all.push_back(request);
      queue_.clear();
      actions.swap(between_);
      stats_.live = 0;
    }
    live_.clear();
    for (const RequestPtr& request : all) tell(request, error, &EngineStats::failed);
  }

  // --- between requests ---

  // Runs the next action if no request is running. Returns true if an action still has to wait for
  // the end of running requests. While an action waits, no request may start.
  bool run_between() {
    std::packaged_task<void()> action;
    {
      const std::lock_guard lock(mutex_);
      if (between_.empty()) return false;
      if (!live_.empty()) return true;
      action = std::move(between_.front());
      between_.pop_front();
    }
    scope_->flush();
    const Uncaptured uncaptured;
    const c10::InferenceMode none(false);
    action();
    return false;
  }

  // Waits until the engine has work to do. Must be called only if no request is running. Returns
  // false if the engine is shut down and has no work left.
  bool rest() {
    std::unique_lock lock(mutex_);
    const auto is_due = [&] {
      return !to_cancel_.empty() || !between_.empty() || may_start() ||
             (closing_ && (queue_.empty() || cancels_all_));
    };
    const auto next = next_time();
    if (!next && !news_.wait_for(lock, kIdle, is_due)) {
      lock.unlock();
      empty_cache();
      lock.lock();
    }
    if (const auto time = next_time()) {
      news_.wait_until(lock, *time, is_due);
    } else if (!is_due()) {
      news_.wait(lock);
    }
    return !(closing_ && queue_.empty() && between_.empty());
  }

  // Returns the time of the next event: a timeout, or the end of max_delay. Returns nullopt if no
  // event is expected. The caller must hold `mutex_`.
  std::optional<Clock::time_point> next_time() const {
    std::optional<Clock::time_point> next;
    if (!deadlines_.empty()) next = deadlines_.begin()->first;
    if (!queue_.empty()) next = next ? std::min(*next, end_of_delay()) : end_of_delay();
    return next;
  }

  const EngineOptions options_;
  std::thread thread_;
  std::mutex join_mutex_;

  mutable std::mutex mutex_;
  std::condition_variable news_;
  // `mutex_` protects the members from here to `stats_`.
  std::map<std::pair<int64_t, uint64_t>, RequestPtr> queue_;            // key: Request::place()
  std::multimap<Clock::time_point, std::weak_ptr<Request>> deadlines_;  // includes started requests
  std::deque<std::packaged_task<void()>> between_;
  std::vector<uint64_t> to_cancel_;
  double queue_cost_ = 0;
  bool closing_ = false, cancels_all_ = false;
  EngineStats stats_;

  Live live_;  // used by the engine's thread only
  double live_cost_ = 0;
  // Moving average of the time from a request's start to its first wait.
  std::chrono::nanoseconds start_time_{0};
  BatchScope* scope_ = nullptr;
  RequestPool* pool_ = nullptr;
};

namespace engine_detail {

void cancel(const std::weak_ptr<EngineLoop>& loop, uint64_t number) {
  if (const std::shared_ptr<EngineLoop> held = loop.lock()) held->cancel(number);
}

void make_real(const std::vector<at::Tensor>& tensors) {
  c10::SmallVector<PendingTensor*, 8> pending;
  for (const at::Tensor& tensor : tensors) {
    if (PendingTensor* p = as_pending(tensor)) pending.push_back(p);
  }
  if (!pending.empty()) ensure_real(pending, "the result of a request");
}

}  // namespace engine_detail

Engine::Engine(const EngineOptions& options) {
  TORCH_CHECK(has_map(),
              "autobatch::Engine needs fibers, and this library was built without Boost.Context: "
              "install it (Debian's package is libboost-context-dev) and build again.");
  TORCH_CHECK(options.max_live >= 1 && options.max_queue >= 1, "autobatch::Engine: max_live is ",
              options.max_live, " and max_queue is ", options.max_queue,
              "; both must be at least 1");
  TORCH_CHECK(options.max_delay.count() >= 0 && options.slice_time.count() > 0,
              "autobatch::Engine: max_delay is ", options.max_delay.count(),
              " ns and slice_time is ", options.slice_time.count(),
              " ns; max_delay must not be negative, and slice_time must be positive");
  TORCH_CHECK(options.stack_size >= kLeastStack, "autobatch::Engine: stack_size is ",
              options.stack_size, " bytes; a request needs at least ", kLeastStack);
  loop_ = std::make_shared<EngineLoop>(options);
  EngineLoop::start(loop_);
}

Engine::~Engine() {
  loop_->shutdown(/*cancel=*/false);
  loop_->detach();
}

uint64_t Engine::post(std::function<void()> function,
                      std::function<void(const std::exception_ptr&)> ended,
                      const RequestOptions& options) {
  return loop_->put(std::move(function), std::move(ended), options);
}

void Engine::cancel(uint64_t number) { loop_->cancel(number); }

std::future<void> Engine::between(std::function<void()> action) {
  return loop_->between(std::move(action));
}

void Engine::shutdown(bool cancel) { loop_->shutdown(cancel); }

EngineStats Engine::stats() const { return loop_->stats(); }

}  // namespace autobatch

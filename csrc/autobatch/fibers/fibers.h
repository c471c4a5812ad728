// Runs instances as fibers. When the code of an instance reads a value, the fiber of this instance
// is suspended, and the next fiber runs. When all fibers wait, one flush computes the values that
// the fibers need.
//
// The host (host_hooks.h) implements the stack switches in classes derived from Fiber and
// FiberPool, by Python's greenlets or by Boost.Context. Fiber and FiberPool decide when a fiber is
// suspended and which values are computed. Both classes also switch the thread-local state.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace autobatch {

class FiberPool;

// The thread-local state of running code. The state consists of PyTorch's modes, the effects of
// guards on the stack, and C++'s list of the exceptions that are being handled. Each suspended
// fiber has a separate state.
class ThreadState {
 public:
  // The part of the state that changes with every call from Python.
  class Stack {
   public:
    Stack() : warnings_(c10::WarningUtils::get_warning_handler()), exceptions_(exceptions()) {}
    void restore() const;

   private:
    // The struct __cxa_eh_globals of the C++ ABI, as libstdc++ and libc++ define it.
    struct Exceptions {
      void* caught;
      unsigned int uncaught;
    };
    static Exceptions& exceptions();

    c10::WarningHandler* warnings_;
    Exceptions exceptions_;
  };

  ThreadState();  // copies the current state of this thread
  // Whether this object equals the current state of the thread, apart from the Stack. Returns false
  // if a state is too complex to compare.
  bool is_current() const;
  void restore() const;  // restores the Stack too
  const Stack& stack() const { return stack_; }

 private:
  c10::impl::LocalDispatchKeySet keys_;
  c10::AutogradState autograd_;
  at::impl::PythonTorchFunctionTLS torch_function_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> debug_info_;
  std::optional<at::impl::SavedTensorDefaultHooksTLS> saved_hooks_;  // set if there are any hooks
  Stack stack_;
  at::ScalarType autocast_cpu_, autocast_cuda_, default_dtype_;
  bool autocast_cache_;
  bool eager_;          // CaptureState::eager
  bool captures_data_;  // CaptureState::captures_data
  bool has_modes_;      // whether a TorchFunctionMode is active
  at::impl::TorchFunctionDisabledState torch_function_disabled_;
};

// The code of one instance, which runs on a separate stack.
class Fiber {
 public:
  Fiber(FiberPool& pool, size_t index) : pool_(pool), index_(index) {}
  virtual ~Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Returns the fiber that this thread runs; null if no fiber runs.
  AUTOBATCH_INTERNAL static Fiber* current();
  // Returns the current fiber, or null if it cannot be suspended here. A fiber cannot be suspended
  // inside a flush, autograd's engine, a transform or a dispatch mode: their state is thread-local
  // and not part of ThreadState, so the next fiber would run inside the same flush, backward pass,
  // transform or mode. A fiber that has entered forward-mode AD cannot be suspended, because a
  // process has only one level of forward-mode AD. While a cell is traced, no fiber can be
  // suspended, because the trace would include ops of other fibers. A fiber that is being ended,
  // holds a Pin or has called `keep_turn` cannot be suspended either.
  AUTOBATCH_INTERNAL static Fiber* suspendable();

  // Suspends this fiber until the tensors are computed. The tensors must belong to this thread's
  // scope. If a tensor is lost, raises the error that caused the loss. For `values_only` see
  // Scope::compute. Returns false if the fiber could not be suspended.
  bool wait_for(at::ArrayRef<PendingTensor*> tensors, const std::string& reason, bool values_only);
  // Suspends this fiber until the fiber with this number has ended. Meanwhile, no later fiber of
  // the pool runs. The number must belong to an earlier fiber of the same pool that is still live.
  // Otherwise returns false without waiting.
  bool wait_for_end(uint64_t number);
  // Finds the first earlier fiber of the pool that is still live, and suspends this fiber until
  // that fiber ends. Returns false, without waiting, if all earlier fibers have ended.
  bool wait_for_earlier();
  // Returns the number of the first earlier fiber of the pool that waits for a tensor for which
  // `is_awaited` returns true. Returns 0 if there is no such fiber.
  template <class IsAwaited>
  uint64_t find_reader(const IsAwaited& is_awaited) const;
  // Suspends this fiber until the host serves it (FiberPool::serve_host) or until FiberPool::wake
  // is called. The host serves fibers when all fibers wait and none waits for a value. Returns
  // false if the fiber could not be suspended.
  AUTOBATCH_INTERNAL bool wait_for_host();

  bool is_of(const FiberPool& pool) const { return &pool == &pool_; }
  size_t index() const { return index_; }
  // Returns a number that no other fiber of the thread has. The number is never 0.
  uint64_t number() const { return number_; }
  void note_check() { has_checks_ = true; }
  // Makes `suspendable` return null from now on: no other fiber runs until this fiber ends. `cause`
  // is for the report, and must not be empty.
  void keep_turn(std::string cause) {
    if (turn_kept_by_.empty()) turn_kept_by_ = std::move(cause);
  }
  // Returns the cause of the first call of keep_turn, or an empty string.
  const std::string& turn_kept_by() const { return turn_kept_by_; }
  // While a Pin exists, `suspendable` returns null. Code that stores addresses of its stack in
  // thread-local variables needs a Pin.
  class Pin {
   public:
    Pin() : fiber_(current()) { count(1); }
    ~Pin() { count(-1); }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;

   private:
    void count(int change) const {
      if (fiber_ != nullptr) fiber_->num_pins_ += change;
    }
    Fiber* fiber_;
  };

 protected:
  enum class Left : uint8_t { kNot, kResumed, kToEnd };
  // Switches to the pool, or directly to the fiber that next_served() returns. Returns when this
  // fiber is resumed. If the host cannot switch at this point, returns kNot immediately.
  virtual Left leave() = 0;
  // Returns the suspended fiber to resume next. The host can switch to this fiber directly, which
  // takes one switch instead of two. The returned fiber is marked as resumed. If the result is
  // null, the host has to switch to the pool.
  AUTOBATCH_INTERNAL Fiber* next_served();
  // Raises the exception that ends a fiber.
  [[noreturn]] virtual void raise_end() = 0;

 private:
  friend class FiberPool;
  enum class State : uint8_t { kRunning, kWaitsForValues, kWaitsForEnd, kWaitsForHost, kEnded };

  bool suspend(State state);

  FiberPool& pool_;
  size_t index_;
  uint64_t number_ = 0;
  bool has_checks_ = false;  // whether note_check() was called for this fiber
  State state_ = State::kRunning;
  bool ending_ = false;
  std::string turn_kept_by_;
  int num_pins_ = 0;
  bool values_only_ = false;
  // The thread-local state of the suspended fiber, if it differs from FiberPool::base_.
  std::optional<ThreadState> own_state_;
  // The tensors that the fiber waits for. The list is not stored on the fiber's stack, because the
  // host may move the stack while the fiber is suspended.
  c10::SmallVector<PendingTensor*, 4> wanted_;
  uint64_t awaited_ = 0;  // number of the fiber whose end this fiber waits for
  std::exception_ptr error_;
};

// Runs the instances of one map, or instances that arrive one by one (serving.cpp). All instances
// run on one thread, in the scope of this thread.
class FiberPool {
 public:
  // `max_live` is the maximum number of fibers that exist at a time. 0: no limit.
  AUTOBATCH_INTERNAL FiberPool(Scope& scope, size_t max_live);
  virtual ~FiberPool() = default;
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  // Runs until all instances have ended. Raises an interruption, or an error that `next` or
  // `serve_host` has raised. In both cases, all fibers are ended first.
  AUTOBATCH_INTERNAL void run();

  // --- instances that arrive one by one (serving.cpp) ---

  // Starts the fiber. Returns when the fiber waits or has ended.
  AUTOBATCH_INTERNAL void start(std::unique_ptr<Fiber> fiber);
  // Runs batches for about `bound`, then resumes the fibers whose values are computed. Returns
  // false if no fiber waits for values. If an op fails, its error is raised in the fibers that wait
  // for the lost tensors. serve_slice() itself raises only interruptions, because an interruption
  // concerns all fibers.
  AUTOBATCH_INTERNAL bool serve_slice(std::chrono::nanoseconds bound);
  // Resumes the fiber if it waits for the host; otherwise returns false.
  AUTOBATCH_INTERNAL bool wake(size_t index);
  // Ends the fiber where it is suspended. The other fibers keep running.
  AUTOBATCH_INTERNAL void end_one(size_t index);
  size_t num_live() const { return fibers_.size(); }
  // Return the total time spent in slices, and the total time spent in the code of instances.
  std::chrono::nanoseconds in_slices() const { return in_slices_; }
  std::chrono::nanoseconds in_fibers() const { return in_fibers_; }

 protected:
  // Returns a fiber for the next instance, which is not started yet. Returns null if there are no
  // more instances.
  virtual std::unique_ptr<Fiber> next() = 0;
  // Starts or resumes the fiber. Returns false when Fiber::current() was suspended, and true when
  // it has ended. Fiber::current() may differ from `fiber`, because the host may switch between
  // fibers directly.
  virtual bool enter(Fiber& fiber) = 0;
  // Resumes a suspended fiber in order to end it. In this fiber, Fiber::leave returns Left::kToEnd.
  // Returns whether the fiber has ended.
  virtual bool end(Fiber& fiber) = 0;
  // Serves the fibers that called wait_for_host.
  virtual void serve_host(at::ArrayRef<Fiber*> waiting) { (void)waiting; }

  // Must be called when an instance has failed. As in a loop, no later instance continues. Earlier
  // instances continue. If an earlier instance fails too, its error is raised instead, because a
  // loop raises the first error.
  void stop_at(size_t index) { stop_ = std::min(stop_, index); }
  Scope& scope() { return scope_; }
  // Returns the ended instances that had deferred checks. An entry contains the index of the
  // instance and the number of its fiber.
  const std::vector<std::pair<size_t, uint64_t>>& checked() const { return checked_; }

 private:
  friend class Fiber;
  void run_all();
  void fill();
  static void number(Fiber& fiber);
  void resume(Fiber& fiber, bool to_end = false);
  void serve();
  Fiber* next_served();
  void serve_values(at::ArrayRef<Fiber*> waiting);
  void sweep();
  void end_from(size_t index);
  bool run_slice(std::chrono::nanoseconds bound);
  bool has_values(Fiber& fiber) const;
  void resume_all(std::vector<Fiber*> fibers);
  Fiber* find(size_t index) const;
  Fiber* find_number(uint64_t number) const;
  bool resume_after_ends();
  // Returns the index of the first fiber that waits for the end of another one. Later fibers must
  // not run. Returns the largest size_t if there is no such fiber.
  size_t first_held() const;

  Scope& scope_;
  Scope::MapMark mark_{scope_};
  size_t max_live_;
  Fiber* outer_;        // the fiber that runs this pool; null if no fiber does
  ThreadState base_;    // state of the code that runs this pool
  bool in_forward_ad_;  // whether the code that made this pool uses forward-mode AD
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> served_;  // fibers to resume, in order
  size_t resumed_ = 0;          // number of fibers in served_ that were resumed
  bool exhausted_ = false;
  std::vector<std::pair<size_t, uint64_t>> checked_;
  size_t stop_ = std::numeric_limits<size_t>::max();
  std::string reason_, site_;                // wait reason and site of the fiber that waited first
  std::optional<Scope::LossesKept> losses_;  // set by serve_slice
  size_t num_held_ = 0;                      // number of fibers that wait for the end of another
  size_t failed_slices_ = 0;                 // number of failed slices whose errors losses_ keeps
  std::chrono::nanoseconds in_slices_{0}, in_fibers_{0};
};

template <class IsAwaited>
uint64_t Fiber::find_reader(const IsAwaited& is_awaited) const {
  for (const auto& fiber : pool_.fibers_) {
    if (fiber->index_ >= index_) break;
    if (fiber->state_ == State::kWaitsForValues &&
        std::any_of(fiber->wanted_.begin(), fiber->wanted_.end(), is_awaited)) {
      return fiber->number_;
    }
  }
  return 0;
}

}  // namespace autobatch

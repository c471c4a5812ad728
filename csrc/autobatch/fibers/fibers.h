// Runs instances as fibers. When the code of an instance reads a value, its fiber is suspended and
// the next fiber runs. When all fibers wait, one flush computes the values that they wait for.
//
// The host implements the fibers themselves (Python's greenlets, Boost.Context) by deriving from
// Fiber and FiberPool. These base classes decide when to suspend a fiber and what to compute, and
// switch the thread-local state.
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

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace autobatch {

class FiberPool;

// The thread-local state of running code: PyTorch's modes, the effects of guards on the stack, and
// C++'s list of exceptions being handled. Each suspended fiber keeps its own state.
class ThreadState {
 public:
  // The part that changes with every call from Python.
  class Stack {
   public:
    Stack() : warnings_(c10::WarningUtils::get_warning_handler()), exceptions_(exceptions()) {}
    void restore() const;

   private:
    // __cxa_eh_globals of the C++ ABI, in libstdc++ and in libc++.
    struct Exceptions {
      void* caught;
      unsigned int uncaught;
    };
    static Exceptions& exceptions();

    c10::WarningHandler* warnings_;
    Exceptions exceptions_;
  };

  ThreadState();  // copies this thread's state
  // Whether this thread's state equals this one, apart from the Stack. False for states that are
  // too complex to compare.
  bool is_current() const;
  void restore() const;  // including the Stack
  const Stack& stack() const { return stack_; }

 private:
  c10::impl::LocalDispatchKeySet keys_;
  c10::AutogradState autograd_;
  at::impl::PythonTorchFunctionTLS torch_function_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> debug_info_;
  std::optional<at::impl::SavedTensorDefaultHooksTLS> saved_hooks_;  // if there are any hooks
  Stack stack_;
  at::ScalarType autocast_cpu_, autocast_cuda_, default_dtype_;
  bool autocast_cache_;
  bool eager_;          // CaptureState::eager
  bool captures_data_;  // CaptureState::captures_data
  bool has_modes_;      // whether a TorchFunctionMode is active
  at::impl::TorchFunctionDisabledState torch_function_disabled_;
};

// The code of one instance, with a stack of its own.
class Fiber {
 public:
  Fiber(FiberPool& pool, size_t index) : pool_(pool), index_(index) {}
  virtual ~Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Returns the fiber that this thread runs; null outside of fibers.
  AUTOBATCH_INTERNAL static Fiber* current();
  // Returns the current fiber, or null if it cannot be suspended here. A fiber cannot be suspended
  // inside a flush, autograd's engine, a transform or a mode, because each of these has one stack
  // per thread. A fiber cannot be suspended in forward-mode AD that it has entered, because a
  // process has only one level of forward-mode AD. While a cell is traced, no fiber can be
  // suspended, because the trace would include ops of other fibers. A fiber that is being ended
  // cannot be suspended either.
  AUTOBATCH_INTERNAL static Fiber* suspendable();

  // Suspends this fiber until the tensors, which belong to this thread's scope, are real or lost.
  // Raises the error through which a tensor was lost. `values_only`: see Scope::compute. Returns
  // false if the fiber could not be suspended.
  bool wait_for(at::ArrayRef<PendingTensor*> tensors, const std::string& reason, bool values_only);
  // Suspends this fiber until the host serves it: when all fibers wait and none waits for a value
  // (FiberPool::serve_host), or by FiberPool::wake. Returns false if the fiber could not be
  // suspended.
  AUTOBATCH_INTERNAL bool wait_for_host();

  size_t index() const { return index_; }
  // Unique among the fibers of a thread; never 0.
  uint64_t number() const { return number_; }
  void note_check() { has_checks_ = true; }
  // From now on this fiber is not suspended until it ends, so that no other fiber runs in between.
  void keep_turn() { keeps_turn_ = true; }

 protected:
  enum class Left : uint8_t { kNot, kResumed, kToEnd };
  // Switches to the pool, or directly to the fiber from next_served(). Returns when this fiber is
  // resumed, or at once with kNot if the host cannot switch here.
  virtual Left leave() = 0;
  // Returns the suspended fiber to resume next, for a host that switches to it directly: one switch
  // instead of two. The fiber counts as resumed from then on. Null: the host has to switch to the
  // pool.
  AUTOBATCH_INTERNAL Fiber* next_served();
  // Raises the exception that ends a fiber.
  [[noreturn]] virtual void raise_end() = 0;

 private:
  friend class FiberPool;
  enum class State : uint8_t { kRunning, kWaitsForValues, kWaitsForHost, kEnded };

  bool suspend(State state);

  FiberPool& pool_;
  size_t index_;
  uint64_t number_ = 0;
  bool has_checks_ = false;  // stays set after the checks are done
  State state_ = State::kRunning;
  bool ending_ = false;
  bool keeps_turn_ = false;
  bool values_only_ = false;
  // The thread-local state of the suspended fiber, if it differs from FiberPool::base_.
  std::optional<ThreadState> own_state_;
  // The tensors that the fiber waits for. They are not stored on the fiber's stack, because the
  // host may move the stack while the fiber is suspended.
  c10::SmallVector<PendingTensor*, 4> wanted_;
  std::exception_ptr error_;
};

// Runs the instances of one map, or instances that arrive one by one (serving.cpp), on one thread
// and in that thread's scope.
class FiberPool {
 public:
  // At most `max_live` fibers exist at a time; 0: no limit.
  AUTOBATCH_INTERNAL FiberPool(Scope& scope, size_t max_live);
  virtual ~FiberPool() = default;
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  // Runs until all instances have ended. Raises an interruption, or an error of `next` or
  // `serve_host`; no fiber is left then.
  AUTOBATCH_INTERNAL void run();

  // --- instances that arrive one by one (serving.cpp) ---

  // Starts the fiber. Returns when it waits or has ended.
  AUTOBATCH_INTERNAL void start(std::unique_ptr<Fiber> fiber);
  // Runs batches for about `bound`, then resumes the fibers whose values are computed. Returns
  // false if no fiber waits for values. The error of an op is raised in the fibers that wait for
  // tensors lost to it. Raises only an interruption, because it concerns all fibers.
  AUTOBATCH_INTERNAL bool serve_slice(std::chrono::nanoseconds bound);
  // Resumes the fiber if it waits for the host, else returns false.
  AUTOBATCH_INTERNAL bool wake(size_t index);
  // Ends the fiber where it is suspended. The other fibers keep running.
  AUTOBATCH_INTERNAL void end_one(size_t index);
  size_t num_live() const { return fibers_.size(); }
  // The total time spent in slices, and in the code of instances.
  std::chrono::nanoseconds in_slices() const { return in_slices_; }
  std::chrono::nanoseconds in_fibers() const { return in_fibers_; }

 protected:
  // Returns the fiber of the next instance, not started yet; null if there are no more.
  virtual std::unique_ptr<Fiber> next() = 0;
  // Starts or resumes the fiber. Returns when Fiber::current() was suspended (false) or has ended
  // (true). The current fiber may differ from `fiber`, because the host may switch between fibers
  // directly.
  virtual bool enter(Fiber& fiber) = 0;
  // Resumes a suspended fiber, in which Fiber::leave returns Left::kToEnd. Returns whether the
  // fiber has ended.
  virtual bool end(Fiber& fiber) = 0;
  // Serves the fibers that called wait_for_host.
  virtual void serve_host(at::ArrayRef<Fiber*> waiting) { (void)waiting; }

  // Must be called when an instance failed. As in a loop, no later instance continues. Earlier
  // instances continue, because they may fail too, and a loop would have raised their error.
  void stop_at(size_t index) { stop_ = std::min(stop_, index); }
  Scope& scope() { return scope_; }
  // The instances that have ended and had deferred checks: index, and number of the fiber.
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

  Scope& scope_;
  Scope::MapMark mark_{scope_};
  size_t max_live_;
  Fiber* outer_;        // the fiber that runs this pool; null: none
  ThreadState base_;    // state of the code that runs this pool
  bool in_forward_ad_;  // whether the code that made this pool is in forward-mode AD
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> served_;  // fibers to resume, in order
  size_t resumed_ = 0;          // number of served_ that were resumed
  bool exhausted_ = false;
  std::vector<std::pair<size_t, uint64_t>> checked_;
  size_t stop_ = std::numeric_limits<size_t>::max();
  std::string reason_, site_;                // of the first fiber to wait since all were resumed
  std::optional<Scope::LossesKept> losses_;  // set by serve_slice
  size_t failed_slices_ = 0;                 // failed slices whose errors losses_ keeps
  std::chrono::nanoseconds in_slices_{0}, in_fibers_{0};
};

}  // namespace autobatch

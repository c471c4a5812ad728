// Instances as fibers: where the code of one reads a value, it is suspended and the next one goes
// on; when all wait, one flush computes what they wait for.
//
// What a fiber is made of (Python's greenlets, Boost.Context) is the host's business: it derives
// from Fiber and FiberPool, which know when to suspend, what to compute, and what thread-local
// state goes with a fiber.
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

// What a thread keeps for the code that it runs: PyTorch's modes and the guards that stand on the
// stack, and C++'s list of exceptions being handled. A suspended fiber takes its own along.
class ThreadState {
 public:
  // What changes with every call from Python.
  class Stack {
   public:
    Stack() : warnings_(c10::WarningUtils::get_warning_handler()), exceptions_(exceptions()) {}
    void restore() const;

   private:
    // Of libstdc++ and libc++ alike (the C++ ABI's __cxa_eh_globals).
    struct Exceptions {
      void* caught;
      unsigned int uncaught;
    };
    static Exceptions& exceptions();

    c10::WarningHandler* warnings_;
    Exceptions exceptions_;
  };

  ThreadState();  // this thread's
  // Whether this thread's is the same, and simple enough to tell; all but the Stack.
  bool is_current() const;
  void restore() const;  // the Stack too
  const Stack& stack() const { return stack_; }

 private:
  c10::impl::LocalDispatchKeySet keys_;
  c10::AutogradState autograd_;
  at::impl::PythonTorchFunctionTLS torch_function_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> debug_info_;
  std::optional<at::impl::SavedTensorDefaultHooksTLS> saved_hooks_;  // if there are any
  Stack stack_;
  at::ScalarType autocast_cpu_, autocast_cuda_, default_dtype_;
  bool autocast_cache_;
  bool eager_;          // CaptureState's
  bool captures_data_;  // CaptureState's
  bool has_modes_;      // of torch functions
  at::impl::TorchFunctionDisabledState torch_function_disabled_;
};

// One instance's code, with a stack of its own.
class Fiber {
 public:
  Fiber(FiberPool& pool, size_t index) : pool_(pool), index_(index) {}
  virtual ~Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The one that this thread runs; null outside of fibers.
  AUTOBATCH_INTERNAL static Fiber* current();
  // The same fiber, or null if it can't be suspended here: within a flush, autograd's engine or a
  // transform, because each of these has one stack a thread; in forward-mode AD that the fiber has
  // entered, because a process has one level of it; and while fibers are being ended.
  AUTOBATCH_INTERNAL static Fiber* suspendable();

  // Suspends this fiber until the tensors, of this thread's scope, are real or lost. Raises what
  // made one be lost. `values_only` as in Scope::compute. False: it could not be suspended.
  bool wait_for(at::ArrayRef<PendingTensor*> tensors, const std::string& reason, bool values_only);
  // Suspends this fiber until all wait and none waits for a value: the host's to serve.
  AUTOBATCH_INTERNAL bool wait_for_host();

  size_t index() const { return index_; }
  // Another one for each fiber of a thread; never 0.
  uint64_t number() const { return number_; }
  void note_check() { has_checks_ = true; }

 protected:
  enum class Left : uint8_t { kNot, kResumed, kToEnd };
  // Goes to the pool, or straight to next_served(); returns when this one is resumed. Or does not,
  // where the host can't.
  virtual Left leave() = 0;
  // The suspended fiber that is to be resumed next, for a host that goes straight to it: one switch
  // instead of two. It counts as resumed from then on. Null: the pool has to be gone to.
  AUTOBATCH_INTERNAL Fiber* next_served();
  // Raises what ends a fiber.
  [[noreturn]] virtual void raise_end() = 0;

 private:
  friend class FiberPool;
  enum class State : uint8_t { kRunning, kWaitsForValues, kWaitsForHost, kEnded };

  bool suspend(State state);

  FiberPool& pool_;
  size_t index_;
  uint64_t number_ = 0;
  bool has_checks_ = false;  // or had
  State state_ = State::kRunning;
  bool ending_ = false;
  bool values_only_ = false;
  // That it waits in, unless it is that of whoever runs the pool.
  std::optional<ThreadState> own_state_;
  // Not on the fiber's stack, which may lie elsewhere while it is suspended.
  c10::SmallVector<PendingTensor*, 4> wanted_;
  std::exception_ptr error_;
};

// Runs the instances of one map, or those that come one by one (serving.cpp). On one thread, and in
// that thread's scope.
class FiberPool {
 public:
  // At most `max_live` fibers exist at a time; 0: no limit.
  AUTOBATCH_INTERNAL FiberPool(Scope& scope, size_t max_live);
  virtual ~FiberPool() = default;
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  // Until all instances have ended. Raises where that is cut short: an interruption, or an error
  // of `next` or `serve_host`; no fiber is left then.
  AUTOBATCH_INTERNAL void run();

  // --- instances that come one by one (serving.cpp) ---

  // Until it waits or has ended.
  AUTOBATCH_INTERNAL void start(std::unique_ptr<Fiber> fiber);
  // Runs batches for about so long, and goes on with the fibers that have what they wait for then.
  // False: no fiber waits for values. An op's error reaches those that wait for what is lost to it.
  // Raises what concerns all: an interruption.
  AUTOBATCH_INTERNAL bool serve_slice(std::chrono::nanoseconds bound);
  // Goes on with a fiber that waits for the host; false if it does not.
  AUTOBATCH_INTERNAL bool wake(size_t index);
  // Ends it where it stands. Others run on.
  AUTOBATCH_INTERNAL void end_one(size_t index);
  size_t num_live() const { return fibers_.size(); }
  // How long slices and the code of instances took, all in all.
  std::chrono::nanoseconds in_slices() const { return in_slices_; }
  std::chrono::nanoseconds in_fibers() const { return in_fibers_; }

 protected:
  // The next instance, not started yet; null if there are no more.
  virtual std::unique_ptr<Fiber> next() = 0;
  // Starts the fiber or goes on with it. Returns when Fiber::current(), this one or another that
  // was gone to since, was suspended or has ended: true.
  virtual bool enter(Fiber& fiber) = 0;
  // Goes on with a suspended fiber, in which Fiber::leave says so. True if it has ended.
  virtual bool end(Fiber& fiber) = 0;
  // Does what fibers wait for that called wait_for_host.
  virtual void serve_host(at::ArrayRef<Fiber*> waiting) { (void)waiting; }

  // An instance failed: as in a loop, no later one is to go on. Earlier ones do, for they may fail
  // too, and theirs is the error that the loop would have met.
  void stop_at(size_t index) { stop_ = std::min(stop_, index); }
  Scope& scope() { return scope_; }
  // Of the instances that have ended, those that had checks wait: index, and number of the fiber.
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
  Fiber* outer_;        // that runs this pool
  ThreadState base_;    // of whoever runs this pool
  bool in_forward_ad_;  // whether the code that made this pool is in forward-mode AD
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> served_;  // have what they waited for
  size_t resumed_ = 0;          // of these
  bool exhausted_ = false;
  std::vector<std::pair<size_t, uint64_t>> checked_;
  size_t stop_ = std::numeric_limits<size_t>::max();
  std::string reason_, site_;                // of the first fiber to wait since all went on
  std::optional<Scope::LossesKept> losses_;  // of slices
  size_t failed_slices_ = 0;                 // whose losses are kept
  std::chrono::nanoseconds in_slices_{0}, in_fibers_{0};
};

}  // namespace autobatch

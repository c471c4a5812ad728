// Fibers that run C++ functions. Each fiber has a separate stack (Boost.Context).
#pragma once

#include "autobatch/fibers/fibers.h"

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>

namespace autobatch {

class StackFiber : public Fiber {
 public:
  using Fiber::Fiber;
  // Starts or resumes the function. If `to_end` is true, ends the function at the point where it is
  // suspended. Returns false when the function was suspended, and true when it has ended.
  virtual bool go(bool to_end) = 0;

  std::exception_ptr error;  // the exception that the function has thrown, or null
};

// A pool of StackFibers.
class StackFiberPool : public FiberPool {
 public:
  using FiberPool::FiberPool;

 protected:
  // Called when a fiber has ended by itself, and was not ended by `end`.
  virtual void ended(StackFiber& fiber) = 0;

 private:
  bool enter(Fiber& fiber) final { return go(fiber, false); }
  bool end(Fiber& fiber) final { return go(fiber, true); }

  bool go(Fiber& fiber, bool to_end) {
    auto& entered = static_cast<StackFiber&>(fiber);
    if (!entered.go(to_end)) return false;
    if (!to_end) ended(entered);
    return true;
  }
};

constexpr size_t kLeastStack = size_t{1} << 14;  // smallest size of a stack, in bytes

// Whether the library was built with Boost.Context.
bool has_stack_fibers();
// Makes a fiber that runs `body`. Throws if the library was built without Boost.Context.
// `stack_size` is the size of the stack's address space in bytes, at least kLeastStack.
std::unique_ptr<StackFiber> make_stack_fiber(FiberPool& pool, size_t index,
                                             std::function<void()> body, size_t stack_size);

}  // namespace autobatch

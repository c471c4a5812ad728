#include "autobatch/fibers/stack_fiber.h"

#include <exception>
#include <new>
#include <utility>

#if AUTOBATCH_HAS_BOOST_CONTEXT
#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <boost/context/stack_context.hpp>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif
#endif

namespace autobatch {

#if AUTOBATCH_HAS_BOOST_CONTEXT

namespace {

namespace ctx = boost::context;

// The exception that ends the function of a fiber. The type is not derived from std::exception. So
// a function that catches std::exception does not catch this exception.
struct Ended {};

// The memory range of a stack. AddressSanitizer must be told the new range at each switch to
// another stack.
struct Stack {
  const void* bottom = nullptr;
  size_t size = 0;
};

void leave_stack([[maybe_unused]] void** kept, [[maybe_unused]] const Stack& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(kept, to.bottom, to.size);
#endif
}

void arrive([[maybe_unused]] void* kept) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
#endif
}

Stack stack_of_thread() {
  Stack stack;
#if defined(__SANITIZE_ADDRESS__)
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  void* bottom = nullptr;
  pthread_attr_getstack(&attributes, &bottom, &stack.size);
  stack.bottom = bottom;
  pthread_attr_destroy(&attributes);
#endif
  return stack;
}

// Allocates stacks with a guard page below them. Boost.Context has allocators with guard pages too,
// but the library that contains them cannot be linked into a shared library.
class StackAllocator {
 public:
  explicit StackAllocator(size_t size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (size + page - 1) / page * page + page;
  }

  ctx::stack_context allocate() const {
    void* low = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (low == MAP_FAILED) throw std::bad_alloc();
    mprotect(low, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
    ctx::stack_context stack;
    stack.size = size_;
    stack.sp = static_cast<char*>(low) + size_;
    return stack;
  }

  void deallocate(ctx::stack_context& stack) const noexcept {
    munmap(static_cast<char*>(stack.sp) - stack.size, stack.size);
  }

 private:
  size_t size_;
};

class ContextFiber final : public StackFiber {
 public:
  ContextFiber(FiberPool& pool, size_t index, std::function<void()> body, size_t stack_size)
      : StackFiber(pool, index), body_(std::move(body)), hub_stack_(stack_here()) {
    StackAllocator allocator(stack_size);
    const ctx::stack_context stack = allocator.allocate();
    own_stack_ = {static_cast<char*>(stack.sp) - stack.size, stack.size};
    self_ = ctx::fiber(std::allocator_arg, ctx::preallocated(stack.sp, stack.size, stack),
                       allocator, [this](ctx::fiber&& hub) {
                         arrive(nullptr);
                         hub_ = std::move(hub);
                         run();
                         leave_stack(nullptr, hub_stack_);  // the last switch of this fiber
                         return std::move(hub_);
                       });
  }

  bool go(bool to_end) override {
    to_end_ = to_end;
    const Stack before = std::exchange(stack_here(), own_stack_);
    void* kept = nullptr;
    leave_stack(&kept, own_stack_);
    self_ = std::move(self_).resume();
    arrive(kept);
    stack_here() = before;
    return done_;
  }

 private:
  // Returns the stack on which this thread runs.
  static Stack& stack_here() {
    static thread_local Stack stack = stack_of_thread();
    return stack;
  }

  void run() {
    try {
      body_();
    } catch (const Ended&) {
    } catch (...) {
      error = std::current_exception();
    }
    done_ = true;
  }

  Left leave() override {
    void* kept = nullptr;
    leave_stack(&kept, hub_stack_);
    hub_ = std::move(hub_).resume();
    arrive(kept);
    return to_end_ ? Left::kToEnd : Left::kResumed;
  }
  [[noreturn]] void raise_end() override { throw Ended(); }

  std::function<void()> body_;
  Stack hub_stack_, own_stack_;
  ctx::fiber self_, hub_;
  bool to_end_ = false, done_ = false;
};

}  // namespace

bool has_stack_fibers() { return true; }

std::unique_ptr<StackFiber> make_stack_fiber(FiberPool& pool, size_t index,
                                             std::function<void()> body, size_t stack_size) {
  return std::make_unique<ContextFiber>(pool, index, std::move(body), stack_size);
}

#else

bool has_stack_fibers() { return false; }

std::unique_ptr<StackFiber> make_stack_fiber(FiberPool&, size_t, std::function<void()>, size_t) {
  TORCH_CHECK(false,
              "torch_autobatch: fibers need Boost.Context, and the library was built without it");
}

#endif

}  // namespace autobatch

#include "autobatch/map.h"

#include "autobatch/autobatch.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/fibers/fibers.h"

#include <exception>
#include <memory>
#include <new>
#include <string>

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

// Ends a body: no std::exception, so that a handler for those does not stop it.
struct Ended {};

// AddressSanitizer has to be told of each change of the stack.
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

// Stacks with a page below that no one may touch. Boost's own allocators of such are in a part of
// its library that a shared one can't be linked with.
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

class BodyFiber final : public Fiber {
 public:
  using Body = std::function<void(size_t)>;

  BodyFiber(FiberPool& pool, size_t index, const Body& body, size_t stack_size)
      : Fiber(pool, index), hub_stack_(stack_here()) {
    StackAllocator allocator(stack_size);
    const ctx::stack_context stack = allocator.allocate();
    own_stack_ = {static_cast<char*>(stack.sp) - stack.size, stack.size};
    self_ = ctx::fiber(std::allocator_arg, ctx::preallocated(stack.sp, stack.size, stack),
                       allocator, [this, &body](ctx::fiber&& hub) {
                         arrive(nullptr);
                         hub_ = std::move(hub);
                         run(body);
                         leave_stack(nullptr, hub_stack_);  // for good
                         return std::move(hub_);
                       });
  }

  // Returns when it was suspended or has ended; the latter if true.
  bool go(bool to_end) {
    to_end_ = to_end;
    const Stack before = std::exchange(stack_here(), own_stack_);
    void* kept = nullptr;
    leave_stack(&kept, own_stack_);
    self_ = std::move(self_).resume();
    arrive(kept);
    stack_here() = before;
    return done_;
  }

  std::exception_ptr error;

 private:
  // The stack that this thread is on.
  static Stack& stack_here() {
    static thread_local Stack stack = stack_of_thread();
    return stack;
  }

  void run(const Body& body) {
    try {
      body(index());
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

  Stack hub_stack_, own_stack_;
  ctx::fiber self_, hub_;
  bool to_end_ = false, done_ = false;
};

class BodyPool final : public FiberPool {
 public:
  BodyPool(Scope& scope, size_t count, const BodyFiber::Body& body, const MapOptions& options)
      : FiberPool(scope, options.max_live),
        count_(count),
        body_(body),
        stack_size_(options.stack_size) {}

  // The exception of the first body that failed; null if none did.
  const std::exception_ptr& failure() const { return failure_; }

 protected:
  std::unique_ptr<Fiber> next() override {
    if (next_ == count_) return nullptr;
    return std::make_unique<BodyFiber>(*this, next_++, body_, stack_size_);
  }
  bool enter(Fiber& fiber) override { return go(fiber, false); }
  bool end(Fiber& fiber) override { return go(fiber, true); }

 private:
  bool go(Fiber& fiber, bool to_end) {
    auto& entered = static_cast<BodyFiber&>(fiber);
    if (!entered.go(to_end)) return false;
    if (entered.error && !to_end && fiber.index() < failed_) {
      failed_ = fiber.index();
      failure_ = name(entered.error, failed_);
      stop_at(failed_);
    }
    return true;
  }

  static std::exception_ptr name(const std::exception_ptr& error, size_t index) {
    const std::string note = "in instance " + std::to_string(index) + " of autobatch::map";
    try {
      std::rethrow_exception(error);
    } catch (c10::Error& e) {
      e.add_context(note);
    } catch (const std::exception& e) {
      host_annotate(e, note);
    } catch (...) {
    }
    return error;
  }

  size_t count_, next_ = 0;
  const BodyFiber::Body& body_;
  size_t stack_size_;
  std::exception_ptr failure_;
  size_t failed_ = std::numeric_limits<size_t>::max();
};

}  // namespace

bool has_map() { return true; }

void for_each_instance(size_t count, const std::function<void(size_t)>& body,
                       const MapOptions& options) {
  constexpr size_t kLeast = size_t{1} << 14;
  TORCH_CHECK(options.stack_size >= kLeast, "autobatch::map: MapOptions::stack_size is ",
              options.stack_size, " bytes; an instance needs ", kLeast, " or more");
  BatchScope opened(options);
  BodyPool pool(*Scope::current(), count, body, options);
  pool.run();
  if (pool.failure()) std::rethrow_exception(pool.failure());
  if (Scope::current()->is_outermost()) opened.flush();  // here, so that an error can be thrown
}

#else

bool has_map() { return false; }

void for_each_instance(size_t, const std::function<void(size_t)>&, const MapOptions&) {
  TORCH_CHECK(false,
              "autobatch::map needs fibers, and this library was built without Boost.Context: "
              "install it (Debian's package is libboost-context-dev) and build again.");
}

#endif

}  // namespace autobatch

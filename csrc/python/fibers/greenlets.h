// Fibers made of Python's greenlets: what ab.map and ab.Engine have in common.
#pragma once

#include "autobatch/fibers/fibers.h"
#include "python/fibers/fiber_state.h"

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>

namespace autobatch {

// greenlet's C interface: the table that its capsule holds, in the order of greenlet.h, which is
// stable. The header itself is not needed to build, nor greenlet.
struct Greenlets {
  PyObject* exit;  // GreenletExit
  PyObject* (*make)(PyObject* run, PyObject* parent);
  PyObject* (*current)();
  PyObject* (*raise)(PyObject* greenlet, PyObject* type, PyObject* value, PyObject* traceback);
  PyObject* (*go)(PyObject* greenlet, PyObject* args, PyObject* names);

  static const Greenlets& api();
};

// Holds the interpreter's lock, which torch's bindings let go before they run an op. On a thread
// that Python knows.
class Gil {
 public:
  Gil();
  ~Gil();
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  bool taken_;
};

// Python's error as a C++ exception, and cleared.
python_error fetch_error();
python_error as_python(const std::exception_ptr& error);

class GreenletPool;

class GreenletFiber final : public Fiber {
 public:
  GreenletFiber(GreenletPool& pool, size_t index, Ref greenlet, Ref args);

  Left leave() override;
  [[noreturn]] void raise_end() override { throw std::move(*end_); }
  bool runs() const { return Ref(Greenlets::api().current()).get() == greenlet_.get(); }

  Ref payload;  // what it waits for, if not for values
  Ref outcome;

 private:
  friend class GreenletPool;
  GreenletPool& pool_;
  Ref greenlet_;
  Ref args_;                         // kept: what it holds is to die where the fiber is freed
  FiberState::Saved state_;          // while it is suspended
  const void* stack_top_ = nullptr;  // its frames lie below; null until it is started
  std::optional<python_error> end_;  // what ends it
};

// Run by the greenlet that makes it, and by no other.
class GreenletPool : public FiberPool {
 public:
  GreenletPool(Scope& scope, size_t max_live);

 protected:
  // That will call function(argument).
  std::unique_ptr<GreenletFiber> make_fiber(size_t index, PyObject* function, PyObject* argument);
  bool enter(Fiber& fiber) override;
  bool end(Fiber& fiber) override;
  // What the function returned; null, with the exception set, where it raised.
  virtual void note_end(Fiber& fiber, Ref result) = 0;
  // It raised, with the exception set, while it was being ended.
  virtual void note_failed_end(Fiber& fiber) = 0;

 private:
  friend class GreenletFiber;

  FiberState state_;
  Ref hub_;
  bool was_suspended_ = false;
};

}  // namespace autobatch

// Implements fibers by Python greenlets, for ab.map and ab.Engine.
#pragma once

#include "autobatch/fibers/fibers.h"
#include "python/fibers/fiber_state.h"

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>

namespace autobatch {

// The C API of greenlet. The functions are read from the table in greenlet's capsule. greenlet.h
// defines the order of the table, and the order is stable. So the build needs neither greenlet.h
// nor greenlet.
struct Greenlets {
  PyObject* exit;  // the class GreenletExit
  PyObject* (*make)(PyObject* run, PyObject* parent);
  PyObject* (*current)();
  PyObject* (*raise)(PyObject* greenlet, PyObject* type, PyObject* value, PyObject* traceback);
  PyObject* (*go)(PyObject* greenlet, PyObject* args, PyObject* names);

  static const Greenlets& api();
};

// Takes the GIL and holds it until destruction. (torch's bindings release the GIL before they run
// an op.) The thread must have a Python thread state.
class Gil {
 public:
  Gil();
  ~Gil();
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  bool taken_;
};

// Returns the current Python exception as a C++ exception, and clears the Python exception.
python_error fetch_error();
// Translates a C++ exception to a Python exception.
python_error as_python(const std::exception_ptr& error);

class GreenletPool;

class GreenletFiber final : public Fiber {
 public:
  GreenletFiber(GreenletPool& pool, size_t index, Ref greenlet, Ref args);

  Left leave() override;
  [[noreturn]] void raise_end() override { throw std::move(*end_); }
  bool runs() const { return Ref(Greenlets::api().current()).get() == greenlet_.get(); }

  Ref payload;  // the argument of wait_in_fiber, which the host reads
  Ref outcome;  // the result that the host returns

 private:
  friend class GreenletPool;

  // The outermost function of each greenlet. Calls function(argument), where `args` is the tuple
  // (function, argument).
  static PyObject* run(PyObject*, PyObject* args);
  static PyObject* runner();  // run() as a Python object; the reference is borrowed

  GreenletPool& pool_;
  Ref greenlet_;
  Ref args_;                         // kept, so that the arguments are freed with the fiber
  FiberState::Saved state_;          // state of the fiber while it is suspended
  const void* stack_top_ = nullptr;  // frame of run(); null before the start
  std::optional<python_error> end_;  // the exception that ends the fiber
};

// A pool must be run by the greenlet that creates it.
class GreenletPool : public FiberPool {
 public:
  GreenletPool(Scope& scope, size_t max_live);

 protected:
  // Returns a fiber that will call function(argument).
  std::unique_ptr<GreenletFiber> make_fiber(size_t index, PyObject* function, PyObject* argument);
  bool enter(Fiber& fiber) override;
  bool end(Fiber& fiber) override;
  // Called when a fiber has ended. `result` is the value that the fiber's function has returned. If
  // the function raised an exception, `result` is null and the exception is set.
  virtual void note_end(Fiber& fiber, Ref result) = 0;
  // Called if a fiber raised an exception other than GreenletExit while end() ended the fiber. The
  // exception is set.
  virtual void note_failed_end(Fiber& fiber) = 0;

 private:
  friend class GreenletFiber;

  FiberState state_;
  Ref hub_;
  bool was_suspended_ = false;
};

}  // namespace autobatch

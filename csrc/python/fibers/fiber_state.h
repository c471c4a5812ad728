// Handles process-wide state of PyTorch and Python packages, such as a stack of contexts. Each
// instance of a map gets a separate copy of this state. When fibers are switched, hooks save the
// state of one instance and restore the state of the next.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

namespace autobatch {

// An owned reference to a Python object, or null.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* stolen) : object_(stolen) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The process-wide state of one map. The state is saved and restored by the hooks that were
// registered when the map began. All members need the GIL.
class FiberState {
 public:
  // Saves the current state. Each instance starts with this state.
  FiberState();
  ~FiberState();
  FiberState(const FiberState&) = delete;
  FiberState& operator=(const FiberState&) = delete;

  using Saved = std::vector<Ref>;
  // Returns the state of the running instance, and restores the state of the map.
  Saved leave();
  // Restores the state of an instance.
  void enter(const Saved& saved);
  // Restores the state of the map.
  void reset();

 private:
  struct Hook {
    Ref save, restore;
    Ref stack;  // a Python list, or null. While the list is empty, the hooks are not called.
    bool is_idle() const { return stack && PyList_GET_SIZE(stack.get()) == 0; }
  };
  friend void add_fiber_state(PyObject* save, PyObject* restore, PyObject* stack);
  static std::vector<Hook>& registered();
  Saved save() const;
  void restore(const Saved& saved) const;

  std::vector<Hook> hooks_;
  Saved own_;
};

// Registers hooks for later maps. `stack` is a Python list, or null. While the list is empty, the
// state is an empty tuple, and the hooks `save` and `restore` are not called. If `stack` is null,
// the hooks are called at each switch.
void add_fiber_state(PyObject* save, PyObject* restore, PyObject* stack);

}  // namespace autobatch

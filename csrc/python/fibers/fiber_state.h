// State that PyTorch and Python packages have once in a process, such as a stack of contexts. Each
// instance of a map gets a state of its own: hooks save and restore it when instances take turns.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

namespace autobatch {

// A reference that is given back.
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

// That of one map, by the hooks that were registered when it began. All need the interpreter's
// lock.
class FiberState {
 public:
  // As it is now, which is how each instance finds it.
  FiberState();
  ~FiberState();
  FiberState(const FiberState&) = delete;
  FiberState& operator=(const FiberState&) = delete;

  using Saved = std::vector<Ref>;
  // What the instance that runs has; the map's own is in place then.
  Saved leave();
  void enter(const Saved& saved);
  // The map's own.
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

// `stack` is a Python list, or null. While the list is empty, the state is an empty tuple, and
// `save` and `restore` are not called. With null they are called each time.
void add_fiber_state(PyObject* save, PyObject* restore, PyObject* stack);

}  // namespace autobatch

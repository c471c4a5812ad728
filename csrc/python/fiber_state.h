// What PyTorch and Python packages keep for the whole process, as stacks of contexts, and each
// instance of a map is to have for itself. A package's hooks save and restore it.
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
    Ref stack;  // a list or null; while it is empty there is nothing to save
    bool is_idle() const { return stack && PyList_GET_SIZE(stack.get()) == 0; }
  };
  friend void add_fiber_state(PyObject* save, PyObject* restore, PyObject* stack);
  static std::vector<Hook>& registered();
  Saved save() const;
  void restore(const Saved& saved) const;

  std::vector<Hook> hooks_;
  Saved own_;
};

// `stack`: a list that is empty while there is nothing to save, and the state then is an empty
// tuple; null: unknown.
void add_fiber_state(PyObject* save, PyObject* restore, PyObject* stack);

}  // namespace autobatch

#include "python/fibers/fiber_state.h"

namespace autobatch {

std::vector<FiberState::Hook>& FiberState::registered() {
  static auto* hooks = new std::vector<Hook>();
  return *hooks;
}

void add_fiber_state(PyObject* save, PyObject* restore, PyObject* stack) {
  FiberState::registered().push_back({Ref::borrow(save), Ref::borrow(restore), Ref::borrow(stack)});
}

FiberState::FiberState() {
  for (const Hook& hook : registered()) {
    hooks_.push_back({Ref::borrow(hook.save.get()), Ref::borrow(hook.restore.get()),
                      Ref::borrow(hook.stack.get())});
  }
  own_ = save();
}

FiberState::~FiberState() { reset(); }

// If a hook fails, the state that the hook handles is not switched. The error does not belong to an
// instance, so the error is reported as unraisable.
FiberState::Saved FiberState::save() const {
  Saved saved;
  for (const Hook& hook : hooks_) {
    saved.emplace_back(hook.is_idle() ? PyTuple_New(0) : PyObject_CallNoArgs(hook.save.get()));
    if (!saved.back()) PyErr_WriteUnraisable(hook.save.get());
  }
  return saved;
}

void FiberState::restore(const Saved& saved) const {
  PyObject *type, *value, *traceback;  // the error that is being propagated
  PyErr_Fetch(&type, &value, &traceback);
  for (size_t i = 0; i < saved.size(); ++i) {
    if (!saved[i]) continue;
    if (hooks_[i].is_idle() && PyObject_IsTrue(saved[i].get()) == 0) continue;
    const Ref done(PyObject_CallOneArg(hooks_[i].restore.get(), saved[i].get()));
    if (!done) PyErr_WriteUnraisable(hooks_[i].restore.get());
  }
  PyErr_Restore(type, value, traceback);
}

FiberState::Saved FiberState::leave() {
  if (hooks_.empty()) return {};
  Saved saved = save();
  reset();
  return saved;
}

void FiberState::enter(const Saved& saved) {
  if (!hooks_.empty()) restore(saved);
}

void FiberState::reset() {
  if (!hooks_.empty()) restore(own_);
}

}  // namespace autobatch

#include "python/fibers/greenlets.h"

#include "python/fibers/pybind_frames.h"

#include <cstring>
#include <utility>

namespace autobatch {

const Greenlets& Greenlets::api() {
  static const Greenlets loaded = [] {
    void** table = static_cast<void**>(PyCapsule_Import("greenlet._C_API", 0));
    if (table == nullptr) throw python_error();
    Greenlets g;
    g.exit = static_cast<PyObject*>(table[2]);
    std::memcpy(&g.make, &table[3], sizeof(void*));
    std::memcpy(&g.current, &table[4], sizeof(void*));
    std::memcpy(&g.raise, &table[5], sizeof(void*));
    std::memcpy(&g.go, &table[6], sizeof(void*));
    return g;
  }();
  return loaded;
}

Gil::Gil() : taken_(PyGILState_Check() == 0) {
  if (taken_) PyEval_RestoreThread(PyGILState_GetThisThreadState());
}

Gil::~Gil() {
  if (taken_) PyEval_SaveThread();
}

python_error fetch_error() {
  python_error error;
  error.persist();
  return error;
}

python_error as_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return fetch_error();
}

// --- a fiber ---

GreenletFiber::GreenletFiber(GreenletPool& pool, size_t index, Ref greenlet, Ref args)
    : Fiber(pool, index), pool_(pool), greenlet_(std::move(greenlet)), args_(std::move(args)) {}

// Code that walks the stack (such as the constructor of c10::Error) must stop at this frame,
// because the memory above the frame belongs to another stack. The unwind information of the frame
// therefore says that the frame has no caller.
PyObject* GreenletFiber::run(PyObject*, PyObject* args) {
#ifdef __GCC_HAVE_DWARF2_CFI_ASM
#if defined(__x86_64__)
  asm volatile(".cfi_undefined rip");
#elif defined(__aarch64__)
  asm volatile(".cfi_undefined x30");
#endif
#endif
  static_cast<GreenletFiber*>(Fiber::current())->stack_top_ = __builtin_frame_address(0);
  PyObject* result = PyObject_CallOneArg(PyTuple_GET_ITEM(args, 0), PyTuple_GET_ITEM(args, 1));
  asm volatile("");  // prevents a tail call, which would remove this frame
  return result;
}

PyObject* GreenletFiber::runner() {
  static PyMethodDef method = {"run_fiber", run, METH_VARARGS, nullptr};
  static PyObject* const function = PyCFunction_New(&method, nullptr);
  return function;
}

Fiber::Left GreenletFiber::leave() {
  const Gil gil;
  const Greenlets& api = Greenlets::api();
  // The instance's code may have created the running greenlet, which may also be in destruction.
  // The stack of such a greenlet does not end at stack_top_.
  if (!runs()) return Left::kNot;
  if (is_in_pybind11(__builtin_frame_address(0), stack_top_)) return Left::kNot;
  const auto* next = static_cast<const GreenletFiber*>(next_served());
  // When control returns to the hub, the flag is true if a fiber was suspended, and false if the
  // function of a fiber has ended. For `next`, the flag remains false until `next` is suspended.
  pool_.was_suspended_ = next == nullptr;
  // The reference is borrowed, so that the greenlet is freed together with its fiber, and not when
  // this fiber resumes. This is safe: a running greenlet holds a reference to itself, and `target`
  // is not used after the switch.
  PyObject* target = next == nullptr ? pool_.hub_.get() : next->greenlet_.get();
  pool_.state_.leave().swap(state_);
  Ref back(api.go(target, nullptr, nullptr));
  pool_.state_.enter(state_);
  state_.clear();
  if (back) return Left::kResumed;
  end_.emplace(fetch_error());
  return Left::kToEnd;
}

// --- the pool ---

GreenletPool::GreenletPool(Scope& scope, size_t max_live)
    : FiberPool(scope, max_live), hub_(Greenlets::api().current()) {
  if (!hub_) throw python_error();
  prepare_is_in_pybind11();
}

std::unique_ptr<GreenletFiber> GreenletPool::make_fiber(size_t index, PyObject* function,
                                                        PyObject* argument) {
  Ref greenlet(Greenlets::api().make(GreenletFiber::runner(), hub_.get()));
  Ref args(PyTuple_Pack(2, function, argument));
  // A new greenlet has an empty context. The greenlet gets a copy of the current context, because
  // the body of a loop runs in the current context.
  const Ref context(PyContext_CopyCurrent());
  if (!greenlet || !args || !context ||
      PyObject_SetAttrString(greenlet.get(), "gr_context", context.get()) != 0) {
    throw fetch_error();
  }
  return std::make_unique<GreenletFiber>(*this, index, std::move(greenlet), std::move(args));
}

bool GreenletPool::enter(Fiber& entered) {
  auto& fiber = static_cast<GreenletFiber&>(entered);
  was_suspended_ = false;
  PyObject* args = fiber.stack_top_ == nullptr ? fiber.args_.get() : nullptr;
  Ref result(Greenlets::api().go(fiber.greenlet_.get(), args, nullptr));
  if (was_suspended_) return false;
  state_.reset();
  note_end(*Fiber::current(), std::move(result));
  return true;
}

bool GreenletPool::end(Fiber& fiber) {
  auto& ending = static_cast<GreenletFiber&>(fiber);
  was_suspended_ = false;
  const Greenlets& api = Greenlets::api();
  const Ref result(api.raise(ending.greenlet_.get(), api.exit, nullptr, nullptr));
  if (was_suspended_) return false;
  state_.reset();
  if (!result) note_failed_end(fiber);
  return true;
}

}  // namespace autobatch

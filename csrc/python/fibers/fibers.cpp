#include "python/fibers/fibers.h"

#include "autobatch/capture/memory_order.h"
#include "python/fibers/greenlets.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace autobatch {
namespace {

// Runs the instances of one map.
class MapPool final : public GreenletPool {
 public:
  MapPool(Scope& scope, size_t max_live, PyObject* function, PyObject* iterator,
          bool return_exceptions, PyObject* serve, PyObject* note_shared)
      : GreenletPool(scope, max_live),
        function_(function),
        iterator_(iterator),
        return_exceptions_(return_exceptions),
        serve_(serve),
        note_shared_(note_shared),
        results_(PyList_New(0)) {
    if (!results_) throw python_error();
  }

  // If the map has opened the scope, computes all pending tensors. If the map has joined an open
  // scope, computes only the values that deferred checks need. Errors must be raised here, because
  // later code cannot find the instance that caused an error.
  void compute_all(PyObject* tensors_in);
  // Returns the list of results. If an instance failed, returns null with the exception set.
  PyObject* finish();

 protected:
  std::unique_ptr<Fiber> next() override;
  void note_end(Fiber& fiber, Ref result) override;
  void note_failed_end(Fiber& fiber) override;
  void serve_host(at::ArrayRef<Fiber*> waiting) override;

 private:
  std::exception_ptr flush_all(PyObject* tensors_in);
  bool note_failed_check(size_t index, uint64_t fiber);
  void note_result(size_t index, Ref result);
  void note_error(size_t index, python_error error);

  PyObject* function_;
  PyObject* iterator_;
  bool return_exceptions_;
  PyObject* serve_;
  PyObject* note_shared_;
  Ref results_;
  std::optional<python_error> failure_;
  size_t failed_ = std::numeric_limits<size_t>::max();  // index of the instance of `failure_`
};

std::unique_ptr<Fiber> MapPool::next() {
  Ref instance(PyIter_Next(iterator_));
  if (!instance) {
    if (PyErr_Occurred() != nullptr) throw fetch_error();
    return nullptr;
  }
  const auto index = static_cast<size_t>(PyList_GET_SIZE(results_.get()));
  auto fiber = make_fiber(index, function_, instance.get());
  if (PyList_Append(results_.get(), Py_None) != 0) throw fetch_error();
  return fiber;
}

void MapPool::note_end(Fiber& fiber, Ref result) {
  if (note_failed_check(fiber.index(), fiber.number())) {
    if (!result) PyErr_Clear();
  } else if (result) {
    note_result(fiber.index(), std::move(result));
  } else {
    note_error(fiber.index(), fetch_error());
  }
}

void MapPool::note_failed_end(Fiber& fiber) {
  if (PyErr_ExceptionMatches(PyExc_Exception) != 0) {
    PyErr_WriteUnraisable(function_);  // a `finally` block raised this error while the fiber ended
  } else {
    note_error(fiber.index(), fetch_error());
  }
}

void MapPool::note_result(size_t index, Ref result) {
  PyList_SetItem(results_.get(), static_cast<Py_ssize_t>(index), result.release());
}

void MapPool::note_error(size_t index, python_error error) {
  const Gil gil;
  PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
  if (error.traceback != nullptr) PyException_SetTraceback(error.value, error.traceback);
  if (PyErr_GivenExceptionMatches(error.type, PyExc_Exception) == 0) {
    // KeyboardInterrupt and similar exceptions end all instances, and take precedence over other
    // errors.
    stop_at(0);
    failed_ = 0;
    failure_.emplace(std::move(error));
    return;
  }
  const std::string note = "in instance " + std::to_string(index) + " of ab.map";
  const Ref noted(PyObject_CallMethod(error.value, "add_note", "s", note.c_str()));
  if (!noted) PyErr_Clear();
  const Ref hint(PyObject_CallOneArg(note_shared_, error.value));
  if (!hint) PyErr_Clear();
  if (return_exceptions_) return note_result(index, Ref::borrow(error.value));
  stop_at(index);
  if (index > failed_) return;
  failed_ = index;
  failure_.emplace(std::move(error));
}

void MapPool::serve_host(at::ArrayRef<Fiber*> waiting) {
  const auto count = static_cast<Py_ssize_t>(waiting.size());
  const Ref payloads(PyList_New(count));
  if (!payloads) throw fetch_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto& fiber = static_cast<GreenletFiber&>(*waiting[static_cast<size_t>(i)]);
    PyList_SET_ITEM(payloads.get(), i, fiber.payload.release());
  }
  const Ref outcomes(PyObject_CallOneArg(serve_, payloads.get()));
  if (!outcomes) throw fetch_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto& fiber = static_cast<GreenletFiber&>(*waiting[static_cast<size_t>(i)]);
    fiber.outcome = Ref(PySequence_GetItem(outcomes.get(), i));
    if (!fiber.outcome) throw fetch_error();
  }
}

// If a check of the instance has failed, records the error of the first failed check and returns
// true. Otherwise returns false. In eager mode, a failed check ends the instance. So the error of
// the check replaces the instance's result, or an error that the instance has raised later.
bool MapPool::note_failed_check(size_t index, uint64_t fiber) {
  const std::exception_ptr failed = scope().failed_check(fiber);
  if (!failed) return false;
  scope().checks().drop(fiber);
  note_error(index, as_python(failed));
  return true;
}

void MapPool::compute_all(PyObject* tensors_in) {
  std::exception_ptr failure;
  const bool wait = std::ranges::any_of(
      checked(), [this](const auto& ended) { return scope().checks().any_waiting(ended.second); });
  if (!failure_ && scope().is_outermost()) {
    failure = flush_all(tensors_in);
  } else if (wait) {
    try {
      host_wait([&] { scope().settle_checks("the end of ab.map"); });
    } catch (const std::exception& error) {
      if (host_interrupts(error)) throw;
      failure = std::current_exception();
    }
  }
  bool failed = false;
  for (const auto& [index, fiber] : checked()) {
    failed = note_failed_check(index, fiber) || failed;
  }
  if (failure && !failure_ && !failed) std::rethrow_exception(failure);
}

// Flushes the scope. If the flush fails, records the error for the instances whose results contain
// lost tensors. Returns the error if no result contains lost tensors, and null otherwise.
std::exception_ptr MapPool::flush_all(PyObject* tensors_in) {
  std::exception_ptr failure;
  try {
    host_wait([&] { scope().flush("the end of ab.map"); });
    return nullptr;
  } catch (const std::exception& error) {
    failure = std::current_exception();
    if (host_interrupts(error)) throw;
  }
  bool found = false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(results_.get()); ++i) {
    const Ref tensors(PyObject_CallOneArg(tensors_in, PyList_GET_ITEM(results_.get(), i)));
    if (!tensors) throw fetch_error();
    std::exception_ptr cause;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(tensors.get()) && !cause; ++k) {
      PyObject* item = PyList_GET_ITEM(tensors.get(), k);
      const PendingTensor* tensor = as_pending(THPVariable_Unpack(item));
      if (tensor != nullptr && tensor->is_lost()) cause = scope().loss_of(*tensor);
    }
    if (!cause) continue;
    found = true;
    note_error(static_cast<size_t>(i), as_python(cause));
    if (failure_) break;
  }
  return found ? nullptr : failure;
}

PyObject* MapPool::finish() {
  if (!failure_) return results_.release();
  failure_->restore();
  return nullptr;
}

// --- functions for Python ---

// run_fibers(function, iterator, return_exceptions, max_live, serve, tensors_in, note_shared,
// watches, warn) returns the list of function(x) for each x of the iterator. `watches` tells
// whether to note the order of uses of shared memory (memory_order.h). The map calls these
// functions:
//   serve(payloads) is called when all fibers wait and none waits for a value. The payloads are the
//     arguments of the fibers' calls of wait_in_fiber. serve() returns a sequence with one outcome
//     for each payload.
//   tensors_in(result) returns the list of the tensors in a result.
//   note_shared(error) adds a note to the error of an instance.
//   warn(text) is called if instances used shared memory in another order than a loop would.
PyObject* run_fibers(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *function, *iterator, *serve, *tensors_in, *note_shared, *warn;
  int return_exceptions = 0, watches = 0;
  Py_ssize_t max_live = 0;
  if (PyArg_ParseTuple(args, "OOpnOOOpO", &function, &iterator, &return_exceptions, &max_live,
                       &serve, &tensors_in, &note_shared, &watches, &warn) == 0) {
    return nullptr;
  }
  Scope* scope = Scope::current();
  TORCH_CHECK(scope != nullptr, "run_fibers: no batch() is open on this thread");
  const Scope::LossesKept losses(*scope);
  // The pool is on the heap. If this function runs in a greenlet, other code may use this part of
  // the stack while the greenlet is suspended.
  const auto pool = std::make_unique<MapPool>(*scope, static_cast<size_t>(max_live), function,
                                              iterator, return_exceptions != 0, serve, note_shared);
  const auto order = std::make_unique<MemoryOrder>(*scope, *pool, watches != 0);
  pool->run();
  pool->compute_all(tensors_in);
  if (const std::string& broken = order->broken(); !broken.empty()) {
    if (!Ref(PyObject_CallFunction(warn, "s", broken.c_str()))) throw python_error();
  }
  return pool->finish();
  END_HANDLE_TH_ERRORS
}

// wait_in_fiber(payload) suspends the fiber until `serve` has been called with the payload, and
// returns the outcome. A fiber of a Server is suspended until `wake` is called, and the function
// returns None. If the running code can't be suspended, the function returns NotImplemented.
PyObject* wait_in_fiber(PyObject*, PyObject* payload) {
  HANDLE_TH_ERRORS
  auto* fiber = dynamic_cast<GreenletFiber*>(Fiber::suspendable());
  if (fiber == nullptr) Py_RETURN_NOTIMPLEMENTED;
  // Before the fiber waits, its deferred checks are verified. The host may start work for the
  // waiting fibers, and a check that fails later could not undo this work.
  Scope& scope = *Scope::current();
  if (scope.checks().any_waiting(fiber->number())) scope.settle_checks("checks before backward()");
  fiber->payload = Ref::borrow(payload);
  if (fiber->wait_for_host()) {
    if (!fiber->outcome) Py_RETURN_NONE;
    return fiber->outcome.release();
  }
  fiber->payload = Ref();
  Py_RETURN_NOTIMPLEMENTED;
  END_HANDLE_TH_ERRORS
}

// compute(tensors, reason) computes the pending tensors of a list in one flush.
PyObject* compute(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* list;
  const char* given = "backward() in ab.map";
  if (PyArg_ParseTuple(args, "O!|s", &PyList_Type, &list, &given) == 0) return nullptr;
  const std::string reason(given);
  c10::SmallVector<PendingTensor*, 64> pending;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!THPVariable_Check(item)) continue;
    if (PendingTensor* p = as_pending(THPVariable_Unpack(item))) pending.push_back(p);
  }
  if (!pending.empty()) host_wait([&] { ensure_real(pending, reason); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// register_fiber_state(save, restore, stack=None) registers hooks for the FiberState of later maps.
PyObject* register_fiber_state(PyObject*, PyObject* args) {
  PyObject *save, *restore, *stack = nullptr;
  if (PyArg_ParseTuple(args, "OO|O!", &save, &restore, &PyList_Type, &stack) == 0) return nullptr;
  add_fiber_state(save, restore, stack);
  Py_RETURN_NONE;
}

// keep_turn(cause) prevents the suspension of the running instance (if there is one) until the
// instance ends.
PyObject* keep_turn(PyObject*, PyObject* cause) {
  const char* text = PyUnicode_AsUTF8(cause);
  if (text == nullptr) return nullptr;
  if (Fiber* fiber = Fiber::current()) fiber->keep_turn(text);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"run_fibers", run_fibers, METH_VARARGS, nullptr},
    {"keep_turn", keep_turn, METH_O, nullptr},
    {"wait_in_fiber", wait_in_fiber, METH_O, nullptr},
    {"register_fiber_state", register_fiber_state, METH_VARARGS, nullptr},
    {"compute", compute, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool is_in_fiber() {
  const auto* fiber = dynamic_cast<const GreenletFiber*>(Fiber::current());
  return fiber != nullptr && fiber->runs();
}

void bind_fibers(PyObject* module) {
  if (PyModule_AddFunctions(module, methods) != 0) throw python_error();
}

}  // namespace autobatch

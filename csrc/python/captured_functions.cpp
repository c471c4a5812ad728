#include "python/captured_functions.h"

#include "autobatch/capture/capture.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/rules/captured_function.h"
#include "autobatch/scope/inner_scope.h"
#include "autobatch/scope/scope.h"
#include "python/fastpath/patches.h"

#include <ATen/core/dispatch/DispatchKeyExtractor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/extension.h>

#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace autobatch {
namespace {

// A call of a custom function, described by a Python object (_function_capture.Call).
class PythonCall final : public FunctionCall {
 public:
  explicit PythonCall(const py::object& object) : object_(py::object(object).release().ptr()) {}
  ~PythonCall() override {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object_);
  }
  py::handle object() const { return object_; }

 private:
  PyObject* object_;
};

py::handle object_of(const FunctionCall& call) {
  return static_cast<const PythonCall&>(call).object();
}

py::object wrap(const at::Tensor& tensor) {  // returns None for an undefined tensor
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

std::vector<at::Tensor> tensors_of(const py::handle& sequence) {
  std::vector<at::Tensor> tensors;
  for (const py::handle item : sequence) {
    tensors.push_back(item.is_none() ? at::Tensor() : THPVariable_Unpack(item.ptr()));
  }
  return tensors;
}

// Iterates over the members of a batch, and returns the tensors of one member at a time.
class MemberViews {
 public:
  explicit MemberViews(const std::vector<MemberTensors>& columns)
      : columns_(columns), offsets_(columns.size(), 0) {}

  // Returns the tensors of the next member, as a tuple.
  py::tuple next() {
    py::tuple tensors(columns_.size());
    for (size_t i = 0; i < columns_.size(); ++i) {
      const auto& [flat, sizes, requires_grad] = columns_[i];
      if (!flat.defined()) {
        tensors[i] = py::none();
        continue;
      }
      const at::IntArrayRef of_member = sizes[member_];
      const int64_t numel = c10::multiply_integers(of_member);
      const at::Tensor tensor = flat.narrow(0, offsets_[i], numel).view(of_member);
      if (requires_grad) {
        torch::autograd::impl::materialize_autograd_meta(tensor)->requires_grad_ = true;
      }
      tensors[i] = wrap(tensor);
      offsets_[i] += numel;
    }
    ++member_;
    return tensors;
  }

 private:
  const std::vector<MemberTensors>& columns_;
  std::vector<int64_t> offsets_;
  size_t member_ = 0;
};

py::tuple wrap_all(const std::vector<at::Tensor>& tensors) {
  py::tuple wrapped(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) wrapped[i] = wrap(tensors[i]);
  return wrapped;
}

InputGradient joined(const std::vector<at::Tensor>& by_member, bool add_up) {
  InputGradient made;
  std::vector<at::Tensor> given;
  for (size_t m = 0; m < by_member.size(); ++m) {
    if (!by_member[m].defined()) continue;
    made.members.push_back(m);
    given.push_back(by_member[m].reshape({-1}));
  }
  if (given.empty()) return made;
  if (given.size() == 1) {
    made.flat = given[0].contiguous();
  } else {
    made.flat = add_up ? at::stack(given).sum(0) : at::cat(given);
  }
  return made;
}

// An inner scope that captures the ops of the user's backward functions.
class BackwardBlock {
 public:
  BackwardBlock() { block_opens(); }
  ~BackwardBlock() {
    scope_.reset();
    block_closes();
  }
  BackwardBlock(const BackwardBlock&) = delete;
  BackwardBlock& operator=(const BackwardBlock&) = delete;
  void finish() { scope_->finish(); }

 private:
  std::optional<InnerScope> scope_{std::in_place};
};

std::vector<InputGradient> run_backward(const FunctionBackward& batch) {
  const py::gil_scoped_acquire gil;
  std::optional<BackwardBlock> block;
  if (batch.calls.size() > 1) block.emplace();
  std::vector<std::vector<at::Tensor>> found(batch.inputs.size(),
                                             std::vector<at::Tensor>(batch.calls.size()));
  MemberViews inputs(batch.inputs), results(batch.results), gradients(batch.gradients);
  for (size_t m = 0; m < batch.calls.size(); ++m) {
    const py::object of_member =
        object_of(*batch.calls[m])
            .attr("gradients")(inputs.next(), results.next(), gradients.next());
    const std::vector<at::Tensor> by_input = tensors_of(of_member);
    for (size_t i = 0; i < found.size(); ++i) {
      if (batch.wanted[i] != 0) found[i][m] = by_input[i];
    }
  }
  std::vector<InputGradient> made;
  made.reserve(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    made.push_back(joined(found[i], batch.shared[i] != 0));
  }
  found.clear();
  if (block.has_value()) block->finish();
  return made;
}

std::vector<at::Tensor> reapply(const std::shared_ptr<FunctionCall>& call, at::TensorList results,
                                at::TensorList inputs) {
  const py::gil_scoped_acquire gil;
  return tensors_of(object_of(*call).attr("reapply")(results.vec(), inputs.vec()));
}

std::vector<at::Tensor> capture_function(const py::object& object, const FunctionTraits& traits,
                                         const std::vector<at::Tensor>& results,
                                         const std::vector<at::Tensor>& inputs, bool eagerly) {
  Scope* scope = capturing_scope();
  // Capture may have ended during forward, for example because the scope was paused.
  if (scope == nullptr || eagerly) {
    std::vector<PendingTensor*> pending;
    for (const auto* tensors : {&results, &inputs}) {
      for (const at::Tensor& tensor : *tensors) {
        if (PendingTensor* p = as_pending(tensor)) pending.push_back(p);
      }
    }
    ensure_real(pending, traits.name);
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    return tensors_of(object.attr("reapply")(results, inputs));
  }
  CellTrace::break_off("it calls a custom autograd.Function", traits.name);
  const auto call = std::make_shared<PythonCall>(object);
  FunctionCall::add(call);
  at::Tensor number;
  {
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    number = at::scalar_tensor(call->number(), at::kLong);
  }
  c10::DispatchKeySet keys = number.key_set();
  for (const auto* tensors : {&results, &inputs}) {
    for (const at::Tensor& tensor : *tensors) keys = keys | tensor.key_set();
  }
  keys = c10::impl::computeDispatchKeySet(keys, c10::DispatchKeySet(c10::DispatchKeySet::FULL));
  torch::jit::Stack stack{c10::List<at::Tensor>(results), number, c10::List<at::Tensor>(inputs)};
  capture_as(function_results_op(traits), keys, &stack);
  scope->keep(call);
  if (stack.size() == 1 && stack[0].isTensorList()) return stack[0].toTensorVector();
  std::vector<at::Tensor> captured;
  for (const c10::IValue& result : stack) captured.push_back(result.toTensor());
  return captured;
}

// share_memory(a, b)
PyObject* share_memory_in_python(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *a, *b;
  if (PyArg_ParseTuple(args, "O!O!", THPVariableClass, &a, THPVariableClass, &b) == 0) {
    return nullptr;
  }
  return PyBool_FromLong(share_memory(THPVariable_Unpack(a), THPVariable_Unpack(b)) ? 1 : 0);
  END_HANDLE_TH_ERRORS
}

// capture_function(call, name, shares_memory, saves, saved_results, saved_inputs, results, inputs,
// eagerly)
PyObject* capture_function_in_python(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *call, *saved_results, *saved_inputs, *results, *inputs;
  const char* name;
  int shares_memory = 0, saves = 0, eagerly = 0;
  if (PyArg_ParseTuple(args, "OsppOOOOp", &call, &name, &shares_memory, &saves, &saved_results,
                       &saved_inputs, &results, &inputs, &eagerly) == 0) {
    return nullptr;
  }
  const FunctionTraits traits{name, shares_memory != 0, saves != 0,
                              py::cast<std::vector<uint8_t>>(py::handle(saved_results)),
                              py::cast<std::vector<uint8_t>>(py::handle(saved_inputs))};
  const std::vector<at::Tensor> captured =
      capture_function(py::reinterpret_borrow<py::object>(call), traits, tensors_of(results),
                       tensors_of(inputs), eagerly != 0);
  return wrap_all(captured).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

// The functions are not bound by pybind11, because an instance of a map may be suspended while one
// of the functions runs.
void bind_captured_functions(PyObject* module) {
  static PyMethodDef methods[] = {
      {"share_memory", share_memory_in_python, METH_VARARGS, nullptr},
      {"capture_function", capture_function_in_python, METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module, methods) != 0) throw py::error_already_set();
  set_function_host({run_backward, reapply});
}

}  // namespace autobatch

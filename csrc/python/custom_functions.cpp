#include "python/custom_functions.h"

#include "autobatch/capture/capture.h"
#include "autobatch/capture/shape_inference.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/fibers/fibers.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/DispatchKeyExtractor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace autobatch {
namespace {

using torch::jit::Stack;

py::object helper(const char* name) {
  return py::module_::import("torch_autobatch._function").attr(name);
}

// --- the op ---

// The Python result of a call that runs eagerly and does not become a node. The op can return only
// tensors, but the class may return other objects too. In a map, calls of many instances may be
// active at the same time, and may end in any order. Entries contain no pointers to the stack,
// because the stack of a suspended instance may have been moved.
class RunResult {
 public:
  explicit RunResult(int64_t call) {
    thread_local uint64_t made = 0;
    id_ = ++made;
    awaited().push_back({id_, current_fiber(), call, nullptr});
  }
  ~RunResult() {
    const py::object result = take();  // destroyed last, because its destructor may run Python code
    std::erase_if(awaited(), [this](const Awaited& a) { return a.id == id_; });
  }
  RunResult(const RunResult&) = delete;
  RunResult& operator=(const RunResult&) = delete;

  // Stores a result in all active calls of the running instance that have the number `call`. If
  // calls with the same number are nested, the result of the outermost call remains, because the
  // outermost call ends last.
  static void note(int64_t call, const py::object& result) {
    std::vector<py::object> before;  // destroyed last, because destructors may run Python code
    for (Awaited& a : awaited()) {
      if (a.fiber != current_fiber() || a.call != call) continue;
      before.push_back(
          py::reinterpret_steal<py::object>(std::exchange(a.result, result.inc_ref().ptr())));
    }
  }
  // Returns the result and clears the stored reference. Returns null if the call has not run.
  py::object take() {
    const auto mine = std::find_if(awaited().begin(), awaited().end(),
                                   [this](const Awaited& a) { return a.id == id_; });
    return py::reinterpret_steal<py::object>(std::exchange(mine->result, nullptr));
  }

 private:
  struct Awaited {
    uint64_t id;
    uint64_t fiber;  // Fiber::number(); 0 if no fiber runs
    int64_t call;
    PyObject* result;  // an owned reference, or null
  };
  static std::vector<Awaited>& awaited() {
    thread_local std::vector<Awaited> all;
    return all;
  }
  static uint64_t current_fiber() {
    const Fiber* fiber = Fiber::current();
    return fiber == nullptr ? 0 : fiber->number();
  }

  uint64_t id_;
};

// The kernel of the op `autobatch::custom_function`. `call` is the number of a Call (_function.py).
// A Call contains the class and the arguments that are not tensors.
std::vector<at::Tensor> custom_function(int64_t call, at::TensorList tensors) {
  const py::gil_scoped_acquire gil;
  try {
    const py::object result = helper("run")(call, tensors.vec(), is_trying());
    if (!is_trying()) RunResult::note(call, result);
    std::vector<at::Tensor> out;
    const bool single = THPVariable_Check(result.ptr());
    if (single) out.push_back(THPVariable_Unpack(result.ptr()));
    if (!single && !py::isinstance<py::tuple>(result)) return out;
    for (const py::handle item : single ? py::tuple() : py::tuple(result)) {
      if (!THPVariable_Check(item.ptr())) return {};
      out.push_back(THPVariable_Unpack(item.ptr()));
    }
    return out;
  } catch (const py::error_already_set& error) {
    // An error in a vmap rule is converted to c10::Error, the type of functorch's own errors. So
    // FunctorchRule falls back to its loop.
    const bool batched =
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    TORCH_CHECK(!batched || !error.matches(PyExc_Exception), error.what());
    throw;
  }
}

const c10::OperatorHandle& function_op() {
  static const c10::OperatorHandle op = [] {
    auto* library =
        new torch::Library(torch::Library::FRAGMENT, "autobatch", std::nullopt, __FILE__, __LINE__);
    library->def("custom_function(int call, Tensor[] tensors) -> Tensor[]");
    library->impl("custom_function",
                  torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &custom_function));
    // This kernel takes precedence over functorch's generic handling of ops. So the class is called
    // inside functorch's transform, where PyTorch handles custom functions in a special way.
    library->impl(
        "custom_function",
        torch::dispatch(c10::DispatchKey::FuncTorchDynamicLayerFrontMode, &custom_function));
    return c10::Dispatcher::singleton().findSchemaOrThrow("autobatch::custom_function", "");
  }();
  return op;
}

// Returns the OpInfo for classes with this name. Reports and errors show the name. The OpInfo is
// never freed.
const OpInfo& info_of(PyObject* function) {
  static auto* known = new std::map<std::string, std::unique_ptr<OpInfo>>();
  const std::string name =
      py::str(py::handle(function).attr("__name__")).cast<std::string>() + ".apply";
  std::unique_ptr<OpInfo>& info = (*known)[name];
  if (info == nullptr) {
    info = std::make_unique<OpInfo>(function_op(), name);
    info->action = Action::kDefer;
    info->num_arguments = 2;
  }
  return *info;
}

// --- Function.apply ---

PyMethodDef* apply_method() {
  static PyMethodDef* const method = [] {
    const py::object base = py::module_::import("torch._C").attr("_FunctionBase");
    py::object descriptor = py::reinterpret_borrow<py::dict>(base.attr("__dict__"))["apply"];
    return reinterpret_cast<PyMethodDescrObject*>(descriptor.ptr())->d_method;
  }();
  return method;
}

PyCFunction original_apply = nullptr;

// The class and the arguments of a call. PyTorch's `apply` takes no keyword arguments before 2.13.
struct Applied {
  PyObject* function;
  PyObject* arguments;
  PyObject* named;  // keyword arguments; may be null

  PyObject* originally() const {
    if ((apply_method()->ml_flags & METH_KEYWORDS) == 0) return original_apply(function, arguments);
    const auto original =
        reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void*>(original_apply));
    return original(function, arguments, named);
  }
};

struct Given {
  bool captured = false;  // whether an op on these tensors would be captured
  std::vector<PendingTensor*> pending;
};

std::vector<at::Tensor> tensors_of(PyObject* arguments) {
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
    PyObject* item = PyTuple_GET_ITEM(arguments, i);
    if (THPVariable_Check(item)) tensors.push_back(THPVariable_Unpack(item));
  }
  return tensors;
}

Given given_of(const Applied& call) {
  std::vector<at::Tensor> tensors = tensors_of(call.arguments);
  if (call.named != nullptr) {
    const auto values = py::reinterpret_steal<py::object>(PyDict_Values(call.named));
    const auto named = py::tuple(values);
    for (at::Tensor& tensor : tensors_of(named.ptr())) tensors.push_back(std::move(tensor));
  }
  Given given;
  for (const at::Tensor& tensor : tensors) {
    PendingTensor* pending = as_pending(tensor);
    if (pending != nullptr && pending->is_pending()) given.pending.push_back(pending);
    given.captured |= tensor.requires_grad() && c10::GradMode::is_enabled();
  }
  given.captured |= !given.pending.empty();
  return given;
}

// Runs the call eagerly, and adds the reason to the report.
PyObject* apply_at_once(Scope& scope, const Applied& call, const Given& given,
                        const std::string& why) {
  CellTrace::break_off("a custom autograd.Function runs eagerly", info_of(call.function).name);
  if (!given.pending.empty()) {
    static auto* reasons = new std::set<std::string>();
    const OpInfo& info = info_of(call.function);
    const char* reason = reasons->insert(why).first->c_str();
    scope.note_at_once(info.name, reason);
    ensure_real(given.pending, info.name + ": " + why.substr(0, why.find(" (")));
  }
  // PyTorch adds the autograd history to the tensors that forward returns, so these tensors must
  // not be pending.
  const struct EagerGuard {
    bool before = set_eager(true);
    ~EagerGuard() { set_eager(before); }
  } eager;
  return call.originally();
}

bool are_pending(at::ArrayRef<at::Tensor> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    const PendingTensor* pending = as_pending(tensor);
    return pending != nullptr && pending->is_pending();
  });
}

// Returns a reference for Scope::keep. The scope holds the object until the pending ops have run.
// After that, autograd's graph holds the object.
std::shared_ptr<void> shared(const py::object& object) {
  return {object.inc_ref().ptr(), [](void* held) {
            if (Py_IsInitialized() == 0) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(held));
          }};
}

// `known`: the Call object of this call (_function.py).
PyObject* apply_captured(Scope& scope, const Applied& call, const py::object& known) {
  const std::vector<at::Tensor> tensors = tensors_of(call.arguments);
  c10::DispatchKeySet keys;
  for (const at::Tensor& tensor : tensors) keys = keys | tensor.key_set();
  keys = c10::impl::computeDispatchKeySet(keys, c10::DispatchKeySet(c10::DispatchKeySet::FULL));
  const auto number = known.attr("number").cast<int64_t>();
  Stack stack{number, c10::List<at::Tensor>(tensors)};
  RunResult result(number);
  capture_as(info_of(call.function), keys, &stack);
  const std::vector<at::Tensor> results = stack.back().toTensorVector();
  if (!are_pending(results)) {
    const py::object given = result.take();
    TORCH_CHECK(given, info_of(call.function).name, " was neither captured nor run");
    return given.inc_ref().ptr();
  }
  scope.keep(shared(known));
  if (known.attr("single").cast<bool>()) return THPVariable_Wrap(results[0]);
  py::tuple out(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    out[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(results[i]));
  }
  return out.release().ptr();
}

// Captures the class's forward op by op.
PyObject* capture_forward(const Applied& call) {
  CellTrace::break_off("a custom autograd.Function is called", info_of(call.function).name);
  static const py::handle capture_in_python =
      py::object(py::module_::import("torch_autobatch._function_capture").attr("capture"))
          .release();
  return capture_in_python(py::handle(call.function), py::handle(call.arguments)).release().ptr();
}

PyObject* apply(const Applied& given_call) {
  HANDLE_TH_ERRORS
  Applied call = given_call;
  py::object arguments, named_arguments;
  if (at::impl::torch_function_mode_enabled()) {
    arguments = helper("leave_trace")(py::handle(call.arguments));
    call.arguments = arguments.ptr();
    if (call.named != nullptr) {
      named_arguments = helper("leave_trace")(py::handle(call.named));
      call.named = named_arguments.ptr();
    }
  }
  Scope* scope = reached_scope();
  const Given given = scope != nullptr ? given_of(call) : Given{};
  if (!given.captured) return call.originally();
  if (c10::InferenceMode::is_enabled() && c10::GradMode::is_enabled()) {
    return apply_at_once(*scope, call, given, "gradients are recorded in inference mode");
  }
  const bool named = call.named != nullptr && PyDict_GET_SIZE(call.named) != 0;
  const py::object known =
      helper("call_of")(py::handle(call.function), py::handle(call.arguments), named);
  if (known.is_none() && !given.pending.empty()) return capture_forward(call);
  if (known.is_none() || py::isinstance<py::str>(known)) {
    return apply_at_once(*scope, call, given, known.is_none() ? "" : known.cast<std::string>());
  }
  return apply_captured(*scope, call, known);
  END_HANDLE_TH_ERRORS
}

PyObject* apply_named(PyObject* function, PyObject* arguments, PyObject* named) {
  return apply({function, arguments, named});
}

PyObject* apply_unnamed(PyObject* function, PyObject* arguments) {
  return apply({function, arguments, nullptr});
}

}  // namespace

void install_custom_functions() {
  PyMethodDef* method = apply_method();
  original_apply = method->ml_meth;
  if (method->ml_flags == (METH_CLASS | METH_VARARGS | METH_KEYWORDS)) {
    method->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&apply_named));
  } else if (method->ml_flags == (METH_CLASS | METH_VARARGS)) {
    method->ml_meth = apply_unnamed;
  }
}

void remove_custom_functions() { apply_method()->ml_meth = original_apply; }

}  // namespace autobatch

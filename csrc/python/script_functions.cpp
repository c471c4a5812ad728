#include "python/script_functions.h"

#include "autobatch/capture/capture.h"
#include "autobatch/fibers/fibers.h"
#include "autobatch/graph/pending_tensor.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/method.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace py = pybind11;

namespace autobatch {
namespace {

namespace jit = torch::jit;

// Returns code that runs the function's graph op by op. Compiling takes much longer than a call, so
// the code is kept as long as the graph exists.
jit::Code code_of(jit::GraphFunction& function) {
  struct Known {
    std::weak_ptr<jit::Graph> graph;
    jit::Code code;
  };
  static auto* known = new std::map<const jit::Graph*, Known>();
  static auto* mutex = new std::mutex();
  const std::shared_ptr<jit::Graph> graph = function.graph();
  const std::lock_guard lock(*mutex);
  const auto found = known->find(graph.get());
  // The entry may belong to a freed graph that had the same address.
  if (found != known->end() && !found->second.graph.expired()) return found->second.code;
  std::erase_if(*known, [](const auto& entry) { return entry.second.graph.expired(); });
  jit::Code code(function.optimized_graph(), function.name());
  known->emplace(graph.get(), Known{graph, code});
  return code;
}

py::object run(jit::Function& function, const std::optional<c10::IValue>& self,
               const py::args& args, const py::kwargs& named) {
  jit::Stack stack =
      jit::createStackForSchema(function.getSchema(), jit::tuple_slice(args), named, self);
  function.ensure_defined();
  const jit::Code code = code_of(jit::toGraphFunction(function));
  {
    const Fiber::Pin pin;  // a thread-local variable refers to the state on the stack
    const py::gil_scoped_release no_gil;
    jit::InterpreterState(code).run(stack);
  }
  return jit::createPyObjectForStack(std::move(stack));
}

// Whether an op on the argument, or on an item of the argument, would be captured.
bool is_captured(PyObject* argument) {
  if (PyList_Check(argument) || PyTuple_Check(argument)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(argument); ++i) {
      if (is_captured(PySequence_Fast_GET_ITEM(argument, i))) return true;
    }
    return false;
  }
  if (!THPVariable_Check(argument)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  const PendingTensor* pending = as_pending(tensor);
  return (pending != nullptr && pending->is_pending()) ||
         (tensor.requires_grad() && c10::GradMode::is_enabled());
}

bool are_captured(PyObject* args, PyObject* named) {
  if (is_captured(args)) return true;
  PyObject *name, *value;
  for (Py_ssize_t i = 0; named != nullptr && PyDict_Next(named, &i, &name, &value) != 0;) {
    if (is_captured(value)) return true;
  }
  return false;
}

py::object run_function(const py::handle& callee, const py::args& args, const py::kwargs& named) {
  return run(*callee.cast<jit::StrongFunctionPtr&>().function_, std::nullopt, args, named);
}

py::object run_method(const py::handle& callee, const py::args& args, const py::kwargs& named) {
  auto& method = callee.cast<jit::Method&>();
  return run(method.function(), c10::IValue(method.owner()._ivalue()), args, named);
}

// The class torch._C.ScriptFunction or torch._C.ScriptMethod, whose `__call__` is replaced.
struct Callable {
  const char* name;
  py::object (*run)(const py::handle& callee, const py::args& args, const py::kwargs& named);
  ternaryfunc replacement;
  // Whether ops may be captured even if no argument is pending, because the ops read the parameters
  // of a module.
  bool has_parameters;
  ternaryfunc original = nullptr;
  // `run` as a pybind11 function, which translates TorchScript's errors.
  PyObject* runner = nullptr;

  PyTypeObject* type() const {
    static auto* module = py::module_::import("torch._C").release().ptr();
    return reinterpret_cast<PyTypeObject*>(py::handle(module).attr(name).ptr());
  }
  void install() {
    if (runner == nullptr) runner = py::cpp_function(run).release().ptr();
    original = std::exchange(type()->tp_call, replacement);
  }
  void remove() const { type()->tp_call = original; }
  PyObject* call(PyObject* self, PyObject* args, PyObject* named) const {
    if (reached_scope() == nullptr || jit::tracer::isTracing() ||
        !(has_parameters || are_captured(args, named))) {
      return original(self, args, named);
    }
    PyObject* first = PyTuple_Pack(1, self);
    PyObject* all = first == nullptr ? nullptr : PySequence_Concat(first, args);
    PyObject* result = all == nullptr ? nullptr : PyObject_Call(runner, all, named);
    Py_XDECREF(first);
    Py_XDECREF(all);
    return result;
  }
};

PyObject* call_function(PyObject* self, PyObject* args, PyObject* named);
PyObject* call_method(PyObject* self, PyObject* args, PyObject* named);

Callable script_function{"ScriptFunction", run_function, call_function, false};
Callable script_method{"ScriptMethod", run_method, call_method, true};

PyObject* call_function(PyObject* self, PyObject* args, PyObject* named) {
  return script_function.call(self, args, named);
}
PyObject* call_method(PyObject* self, PyObject* args, PyObject* named) {
  return script_method.call(self, args, named);
}

}  // namespace

void install_script_functions() {
  script_function.install();
  script_method.install();
}

void remove_script_functions() {
  script_method.remove();
  script_function.remove();
}

}  // namespace autobatch

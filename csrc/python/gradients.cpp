#include "python/gradients.h"

#include "autobatch/capture/capture.h"
#include "autobatch/derivatives/captured_gradient.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

namespace autobatch {
namespace {

// Returns the tensors of a tuple or list. Returns nothing if an item is not a tensor.
std::optional<std::vector<at::Tensor>> tensors_in(PyObject* sequence) {
  if (PyTuple_Check(sequence) == 0 && PyList_Check(sequence) == 0) return std::nullopt;
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(sequence, i);
    if (!THPVariable_Check(item)) return std::nullopt;
    tensors.push_back(THPVariable_Unpack(item));
  }
  return tensors;
}

// derive(outputs, gradients, inputs, retain_graph, create_graph, allow_unused) returns the
// gradients that autograd.grad would return, as pending tensors. Returns NotImplemented if autograd
// has to run.
PyObject* derive_in_python(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *outputs, *gradients, *inputs;
  int retain_graph = 0, create_graph = 0, allow_unused = 0;
  if (PyArg_ParseTuple(args, "OOOppp", &outputs, &gradients, &inputs, &retain_graph, &create_graph,
                       &allow_unused) == 0) {
    return nullptr;
  }
  const auto of = tensors_in(outputs), given = tensors_in(gradients), by = tensors_in(inputs);
  if (!of.has_value() || !given.has_value() || !by.has_value() || of->size() != given->size()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  std::optional<std::vector<at::Tensor>> found;
  {
    const pybind11::gil_scoped_release no_gil;
    found = derive(*of, *given, *by, {retain_graph != 0, create_graph != 0, allow_unused != 0});
  }
  if (!found.has_value()) Py_RETURN_NOTIMPLEMENTED;
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(found->size()));
  if (result == nullptr) return nullptr;
  for (size_t i = 0; i < found->size(); ++i) {
    PyObject* item = THPVariable_Wrap((*found)[i]);  // `item` is None if the gradient is undefined
    if (item == nullptr) {
      Py_DECREF(result);
      return nullptr;
    }
    PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(i), item);
  }
  return result;
  END_HANDLE_TH_ERRORS
}

// depends_on_others(outputs, leaves) returns whether backward from the pending tensors `outputs`
// reaches a graph input that is not in `leaves`.
PyObject* depends_on_others_in_python(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *outputs, *leaves;
  if (PyArg_ParseTuple(args, "OO", &outputs, &leaves) == 0) return nullptr;
  const auto of = tensors_in(outputs), given = tensors_in(leaves);
  TORCH_CHECK_TYPE(of.has_value() && given.has_value(), "depends_on_others: expected tensors");
  bool depends = false;
  {
    const pybind11::gil_scoped_release no_gil;
    depends = depends_on_others(*of, *given);
  }
  return PyBool_FromLong(depends ? 1 : 0);
  END_HANDLE_TH_ERRORS
}

// captures() returns whether ops of this thread are currently captured.
PyObject* captures(PyObject*, PyObject*) {
  return PyBool_FromLong(capturing_scope() != nullptr ? 1 : 0);
}

// A function or class of a Python module that is replaced while blocks are open.
struct Replaced {
  PyObject *module, *name, *original, *ours;  // these references are never released

  // Replaces the module's attribute `from` with `to`. Does nothing if the module's attribute is not
  // `from`. In this case other code has replaced the attribute.
  void exchange(PyObject* from, PyObject* to) const {
    PyObject* now = PyObject_GetAttr(module, name);
    const bool failed = now == nullptr || (now == from && PyObject_SetAttr(module, name, to) != 0);
    Py_XDECREF(now);
    if (failed) throw python_error();
  }
};
std::vector<Replaced>& replaced() {
  static auto* all = new std::vector<Replaced>();
  return *all;
}

// replace(module, name, ours) replaces the module's attribute with `ours` in each later block.
PyObject* replace(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *module, *name, *ours;
  if (PyArg_ParseTuple(args, "OUO", &module, &name, &ours) == 0) return nullptr;
  PyObject* original = PyObject_GetAttr(module, name);
  if (original == nullptr) return nullptr;
  replaced().push_back({Py_NewRef(module), Py_NewRef(name), original, Py_NewRef(ours)});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"replace", replace, METH_VARARGS, nullptr},
    {"captures", captures, METH_NOARGS, nullptr},
    {"depends_on_others", depends_on_others_in_python, METH_VARARGS, nullptr},
    {"derive", derive_in_python, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void install_gradients() {
  for (const Replaced& each : replaced()) each.exchange(each.original, each.ours);
}

void remove_gradients() {
  for (const Replaced& each : replaced()) each.exchange(each.ours, each.original);
}

void bind_gradients(PyObject* module) {
  if (PyModule_AddFunctions(module, methods) != 0) throw python_error();
}

}  // namespace autobatch

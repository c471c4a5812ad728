#include "python/fastpath/in_place_calls.h"

#include "autobatch/capture/adopt.h"
#include "autobatch/common/compat_indexing.h"
#include "autobatch/graph/pending_tensor.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <string>
#include <vector>

namespace py = pybind11;

namespace autobatch {
namespace {

bool is_tensor(PyObject* object) {
  return Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

bool is_pending(PyObject* object) {
  return is_tensor(object) && as_pending(THPVariable_Unpack(object)) != nullptr;
}

// If possible, replaces the tensor in the Python object with a pending copy. The identity, the
// attributes and the weak references of the object do not change.
void adopt(PyObject* object) {
  if (reinterpret_cast<THPVariable*>(object)->backward_hooks != nullptr) return;
  at::Tensor copy = pending_copy(THPVariable_Unpack(object));
  if (!copy.defined()) return;
  static auto* const swap_tensors =
      new py::object(py::module_::import("torch._C").attr("_swap_tensor_impl"));
  const auto other = py::reinterpret_steal<py::object>(THPVariable_Wrap(copy));
  if (!other) throw py::error_already_set();
  const TensorSwap exchange(copy);
  copy.reset();
  try {
    (*swap_tensors)(py::handle(object), other);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
  }  // PyTorch refused the exchange: the object keeps its tensor
}

void prepare(PyObject* self, PyObject* const* others, Py_ssize_t count) {
  if (!is_tensor(self) || at::impl::torch_function_mode_enabled()) return;
  if (as_pending(THPVariable_Unpack(self)) != nullptr) return;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (is_pending(others[i])) return adopt(self);
  }
}

// --- methods ---

vectorcallfunc original_call = nullptr;
objobjargproc original_set_item = nullptr;

PyObject* call(PyObject* method, PyObject* const* values, size_t count, PyObject* names) {
  const Py_ssize_t given = PyVectorcall_NARGS(count);
  try {
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    if (given > 0) prepare(values[0], values + 1, given - 1 + named);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  return original_call(method, values, count, names);
}

// If PyTorch would read the storage of a 0-dimensional value, returns the value as a tensor of size
// [1], which broadcasts in the same way. Otherwise returns null.
py::object with_a_dimension(PyObject* self, PyObject* value) {
  if (!is_tensor(self) || !is_tensor(value) || at::impl::torch_function_mode_enabled()) return {};
  const at::Tensor& number = THPVariable_Unpack(value);
  const at::Tensor& target = THPVariable_Unpack(self);
  if (number.dim() != 0 || number.scalar_type() != target.scalar_type()) return {};
  if (as_pending(number) == nullptr && as_pending(target) == nullptr) return {};
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(number.unsqueeze(0)));
}

int set_item(PyObject* self, PyObject* index, PyObject* value) {
  HANDLE_TH_ERRORS
  py::object wide;
  if (value != nullptr) {
    prepare(self, &value, 1);
    if constexpr (compat::kSetItemAsksForStorage) wide = with_a_dimension(self, value);
  }
  return original_set_item(self, index, wide ? wide.ptr() : value);
  END_HANDLE_TH_ERRORS_RET(-1)
}

// Returns the in-place methods that have the calling convention of `add_` and `__iadd__`.
std::vector<PyMethodDescrObject*> find_methods() {
  std::vector<PyMethodDescrObject*> methods;
  const py::object base = py::module_::import("torch._C").attr("TensorBase");
  const py::dict dict(base.attr("__dict__"));  // a copy, because `__dict__` is a mapping proxy
  for (const auto& [key, found] : dict) {
    const auto name = py::cast<std::string>(key);
    const bool in_place = name.starts_with("__") ? name.starts_with("__i") && name.ends_with("__")
                                                 : name.ends_with("_") && !name.starts_with("_");
    if (!in_place || !Py_IS_TYPE(found.ptr(), &PyMethodDescr_Type)) continue;
    auto* method = reinterpret_cast<PyMethodDescrObject*>(found.ptr());
    if (method->d_method->ml_flags == (METH_VARARGS | METH_KEYWORDS)) methods.push_back(method);
  }
  return methods;
}

const std::vector<PyMethodDescrObject*>& methods() {
  static const auto* all = new std::vector<PyMethodDescrObject*>(find_methods());
  return *all;
}

objobjargproc& set_item_slot() {
  return reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_as_mapping->mp_ass_subscript;
}

}  // namespace

void install_in_place_calls() {
  if (methods().empty()) return;
  original_call = methods().front()->vectorcall;
  for (PyMethodDescrObject* method : methods()) method->vectorcall = call;
  original_set_item = std::exchange(set_item_slot(), set_item);
}

void remove_in_place_calls() {
  if (methods().empty()) return;
  for (PyMethodDescrObject* method : methods()) method->vectorcall = original_call;
  set_item_slot() = original_set_item;
}

}  // namespace autobatch

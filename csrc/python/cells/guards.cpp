#include "python/cells/guards.h"

#include "python/fastpath/dict_version.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace autobatch {

Guards::~Guards() {
  if (!Py_IsInitialized()) return;
  const PyGILState_STATE gil = PyGILState_Ensure();
  for (PyObject* object : held_) Py_DECREF(object);
  PyGILState_Release(gil);
}

bool Guards::add(PyObject* found) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found); ++i) {
    PyObject* triple = PyList_GET_ITEM(found, i);
    if (!PyTuple_Check(triple) || PyTuple_GET_SIZE(triple) != 3) {
      PyErr_SetString(PyExc_TypeError, "guards are tuples of (dict, name, value)");
      return false;
    }
    held_.push_back(Py_NewRef(triple));
    PyObject* dict = PyTuple_GET_ITEM(triple, 0);
    const auto [at, is_new] = numbers_.try_emplace(dict, tables_.size());
    if (is_new) tables_.push_back({dict, {}});
    tables_[at->second].items.push_back({PyTuple_GET_ITEM(triple, 1), PyTuple_GET_ITEM(triple, 2)});
  }
  return true;
}

void Guards::add_tensors(PyObject* tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    kinds_.push_back({tensor, tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()});
  }
}

bool Guards::hold() {
  return std::all_of(kinds_.begin(), kinds_.end(), [](const Kind& kind) { return kind.holds(); }) &&
         std::all_of(tables_.begin(), tables_.end(), [](Table& table) { return table.holds(); });
}

bool Guards::Table::holds() {
  if (!PyDict_Check(dict)) return false;  // a scripted module has another type
  const uint64_t now = version_of(dict);
  if (version != 0 && now == version) return true;
  for (const Item& item : items) {
    const bool same = item.name == Py_None ? PyDict_GET_SIZE(dict) == PyLong_AsSsize_t(item.value)
                                           : PyDict_GetItemWithError(dict, item.name) == item.value;
    if (!same) return false;
  }
  version = now;
  return true;
}

}  // namespace autobatch

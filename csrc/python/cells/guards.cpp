#include "python/cells/guards.h"

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
    guards_.push_back(
        {PyTuple_GET_ITEM(triple, 0), PyTuple_GET_ITEM(triple, 1), PyTuple_GET_ITEM(triple, 2)});
  }
  return true;
}

bool Guards::Guard::holds() const {
  if (!PyDict_Check(dict)) return false;  // a scripted module's
  if (name == Py_None) return PyDict_GET_SIZE(dict) == PyLong_AsSsize_t(value);
  return PyDict_GetItemWithError(dict, name) == value;
}

bool Guards::hold() {
  if (are_unchanged()) return true;
  for (const Guard& guard : guards_) {
    if (!guard.holds()) return false;
  }
  note_versions();
  return true;
}

// A dict has another version after each write to it, and no two have the same one. Where Python
// does not tell it, each guard is looked at.
#if PY_VERSION_HEX < 0x030C0000

namespace {

uint64_t version_of(PyObject* dict) {
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
}

}  // namespace

bool Guards::are_unchanged() const {
  for (const auto& [dict, version] : versions_) {
    if (version_of(dict) != version) return false;
  }
  return !versions_.empty();
}

void Guards::note_versions() {
  versions_.clear();
  for (const Guard& guard : guards_) {
    const std::pair<PyObject*, uint64_t> now{guard.dict, version_of(guard.dict)};
    if (std::find(versions_.begin(), versions_.end(), now) == versions_.end()) {
      versions_.push_back(now);
    }
  }
}

#else

bool Guards::are_unchanged() const { return false; }
void Guards::note_versions() {}

#endif

}  // namespace autobatch

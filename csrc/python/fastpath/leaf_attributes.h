// Reads the attributes of a leaf module (leaf_modules.h) from its `__dict__`.
#pragma once

#include "python/fastpath/dict_version.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <array>
#include <string>

namespace autobatch {

// An attribute name. The string is interned, so that a dict lookup only compares pointers.
// Instances are created while this extension is imported, because the GIL is held at that time.
class Name {
 public:
  explicit Name(const char* text) : object_(PyUnicode_InternFromString(text)) {}
  PyObject* object() const { return object_; }

 private:
  PyObject* object_;  // the reference is never released
};

inline const Name kForward("forward");
inline const Name kCompiledCallImpl("_compiled_call_impl");
inline const Name kParameters("_parameters");
inline const Name kForwardHooks("_forward_hooks");
inline const Name kForwardPreHooks("_forward_pre_hooks");
inline const Name kBackwardHooks("_backward_hooks");
inline const Name kBackwardPreHooks("_backward_pre_hooks");

// The results of the attribute lookups in one module, in the order of the lookups. Each call of a
// module looks up the same names in the same order. While the module's dicts do not change, the
// results of the lookups do not change.
struct Findings {
  const void* kind = nullptr;  // the kind of module, which determines the lookups
  uint64_t version = 0;        // version of the module's `__dict__`; 0: no results are kept
  PyObject* parameters = nullptr;
  uint64_t parameters_version = 0;
  size_t count = 0;
  std::array<PyObject*, 16> found{};

  // Returns the stored results for the module with this dict. If the dict has changed, the returned
  // object contains no results.
  static Findings& of(PyObject* dict, const void* kind) {
    static std::array<Findings, 256> table;  // the GIL guards the table
    Findings& known = table[reinterpret_cast<uintptr_t>(dict) * 0x9E3779B97F4A7C15U >> 56];
    const uint64_t version = version_of(dict);
    const bool same = version != 0 && known.version == version && known.kind == kind &&
                      version_of(known.parameters) == known.parameters_version;
    if (!same) known.begin(dict, kind, version);
    return known;
  }

 private:
  void begin(PyObject* dict, const void* of, uint64_t now) {
    parameters = PyDict_GetItemWithError(dict, kParameters.object());
    const bool keeps = parameters != nullptr && PyDict_Check(parameters);
    kind = of;
    version = keeps ? now : 0;
    parameters_version = keeps ? version_of(parameters) : 0;
    count = 0;
  }
};

// Reads the attributes of one module from its `__dict__`. If an attribute is not in the dict where
// nn.Module stores it, complete() returns false, and the caller calls the module in the ordinary
// way.
class Attributes {
 public:
  Attributes(PyObject* dict, const void* kind)
      : dict_(dict), findings_(Findings::of(dict, kind)), parameters_(findings_.parameters) {
    complete_ = parameters_ != nullptr;
  }

  bool complete() const { return complete_; }

  // Returns a parameter, or an undefined tensor if the parameter is None. The reference is valid
  // until Python code runs.
  const at::Tensor& parameter(const Name& name) {
    static const at::Tensor none;
    PyObject* value = parameters_ == nullptr ? nullptr : item(parameters_, name);
    if (value == Py_None) return none;
    if (value == nullptr || !THPVariable_CheckExact(value) || item(dict_, name) != nullptr) {
      complete_ = false;
      return none;
    }
    return THPVariable_Unpack(value);
  }

  bool flag(const Name& name) {
    PyObject* value = find(name);
    complete_ = complete_ && (value == Py_True || value == Py_False);
    return value == Py_True;
  }

  double number(const Name& name) {
    PyObject* value = find(name);
    complete_ = complete_ && value != nullptr && PyFloat_CheckExact(value) != 0;
    return complete_ ? PyFloat_AS_DOUBLE(value) : 0;
  }

  // Returns an int, or `none` if the attribute is None.
  int64_t integer(const Name& name, int64_t none) {
    PyObject* value = find(name);
    if (value == Py_None) return none;
    complete_ = complete_ && value != nullptr && PyLong_CheckExact(value) != 0;
    return complete_ ? PyLong_AsLongLong(value) : 0;
  }

  bool is_none(const Name& name) { return find(name) == Py_None; }

  at::DimVector sizes(const Name& name) {
    at::DimVector out;
    PyObject* value = find(name);
    complete_ = complete_ && value != nullptr && PyTuple_CheckExact(value) != 0;
    for (Py_ssize_t i = 0; complete_ && i < PyTuple_GET_SIZE(value); ++i) {
      PyObject* size = PyTuple_GET_ITEM(value, i);
      complete_ = PyLong_CheckExact(size) != 0;
      if (complete_) out.push_back(PyLong_AsLongLong(size));
    }
    return out;
  }

  std::string text(const Name& name) {
    PyObject* value = find(name);
    complete_ = complete_ && value != nullptr && PyUnicode_CheckExact(value) != 0;
    return complete_ ? PyUnicode_AsUTF8(value) : "";
  }

  // Returns the values of a dict, copied into a list.
  pybind11::object values(const Name& name) {
    PyObject* value = find(name);
    complete_ = complete_ && value != nullptr && PyDict_CheckExact(value) != 0;
    return complete_ ? pybind11::reinterpret_steal<pybind11::object>(PyDict_Values(value))
                     : pybind11::object();
  }

  // Whether the module has no hooks, no compiled call, and no `forward` in its `__dict__`.
  bool is_plain() {
    for (const Name* name :
         {&kForwardHooks, &kForwardPreHooks, &kBackwardHooks, &kBackwardPreHooks}) {
      PyObject* hooks = item(dict_, *name);
      if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 0) return false;
    }
    return item(dict_, kForward) == nullptr && item(dict_, kCompiledCallImpl) == nullptr;
  }

 private:
  PyObject* item(PyObject* dict, const Name& name) {
    if (next_ < findings_.count) return findings_.found[next_++];
    PyObject* value = PyDict_GetItemWithError(dict, name.object());
    if (findings_.version != 0 && findings_.count < findings_.found.size()) {
      findings_.found[findings_.count++] = value;
      ++next_;
    }
    return value;
  }

  PyObject* find(const Name& name) {
    PyObject* value = item(dict_, name);
    complete_ = complete_ && value != nullptr;
    return value;
  }

  bool complete_ = true;
  PyObject* dict_;
  Findings& findings_;
  size_t next_ = 0;  // index of the next lookup
  PyObject* parameters_;
};

}  // namespace autobatch

// Converts the arguments and results of cells. Arguments and results may be tensors in nested
// structures (tuples, lists, dicts, named tuples, dataclasses) and other objects.
#pragma once

#include "autobatch/graph/signature.h"

#include <ATen/core/Tensor.h>

#include <Python.h>

#include <vector>

namespace autobatch {

// The flattened arguments of one call. The tensors are stored in the order of the arguments. Words
// encode the structure of the arguments, and all arguments that are not tensors.
class CellInputs {
 public:
  CellInputs() = default;
  CellInputs(const CellInputs&) = delete;
  CellInputs& operator=(const CellInputs&) = delete;
  ~CellInputs();

  // Adds the arguments of a call. If there is an error, such as an argument that is not hashable,
  // returns false with a Python exception set.
  bool add_call(PyObject* function, PyObject* const* args, Py_ssize_t count, PyObject* names);

  // Returns false if an argument prevents the capture of the call. The words and tensors are then
  // incomplete. Such arguments are instances of a subclass of Tensor (other than nn.Parameter),
  // list or dict, dicts with tensors as keys, and dataclass instances with attributes that are not
  // fields. Dataclass instances that contain themselves or are nested too deeply also prevent the
  // capture.
  bool capturable() const { return capturable_; }
  // The tensors are borrowed from the call's arguments until hold() takes references to them. Call
  // hold() before the function runs. For arguments that can change, such as lists, add_call() calls
  // hold() itself.
  at::ArrayRef<at::Tensor> tensors() const { return tensors_; }
  void hold();
  at::ArrayRef<uint64_t> words() const { return words_; }
  // Returns the objects whose addresses are among the words, as borrowed references.
  at::ArrayRef<PyObject*> objects() const { return objects_; }
  // Returns the nn.Modules among the objects, as borrowed references. If the function is an
  // nn.Module, or is a bound method of an nn.Module, this module is included.
  at::ArrayRef<PyObject*> modules() const { return modules_; }

 private:
  bool add(PyObject* value);
  bool add_items(PyObject* sequence);
  bool add_dict(PyObject* dict);
  bool add_fields(PyObject* instance, PyObject* fields);
  bool add_object(PyObject* object);
  void add_text(PyObject* text);

  bool capturable_ = true;
  bool owns_ = false;
  int depth_ = 0;
  c10::SmallVector<at::Tensor, 8> tensors_;
  Key words_;
  c10::SmallVector<PyObject*, 4> objects_, modules_;
};

// The structure of a result. An OutputSpec can build an equal structure from other tensors.
class OutputSpec {
 public:
  // Records the structure of the result, and appends the tensors of the result to `tensors`.
  // Returns false if the result contains a mutable object, because such a result can't be rebuilt.
  // If there is an error, returns false with a Python exception set.
  bool describe(PyObject* value, std::vector<at::Tensor>& tensors, int depth = 0);
  // Returns the rebuilt result as a new reference. If there is an error, returns null with a Python
  // exception set.
  PyObject* build(at::ArrayRef<at::Tensor> tensors) const;
  // Whether `other` has the same structure and equal constants.
  bool equals(const OutputSpec& other) const;
  void clear();  // needs the GIL

 private:
  enum class Kind : uint8_t { kTensor, kConstant, kTuple, kList, kDict, kNamedTuple, kDataclass };

  bool describe_items(PyObject* sequence, std::vector<at::Tensor>& tensors, int depth);
  bool describe_dict(PyObject* dict, std::vector<at::Tensor>& tensors, int depth);
  bool describe_dataclass(PyObject* value, PyObject* fields, std::vector<at::Tensor>& tensors,
                          int depth);
  PyObject* build(const at::Tensor*& next) const;
  PyObject* build_dict(const at::Tensor*& next) const;
  PyObject* build_sequence(const at::Tensor*& next) const;
  PyObject* build_dataclass(const at::Tensor*& next) const;

  Kind kind_ = Kind::kConstant;
  std::vector<OutputSpec> parts_;
  std::vector<PyObject*> names_;  // keys of a dict, field names of a dataclass; owned
  PyObject* object_ = nullptr;    // constant, or type of a named tuple or dataclass; owned
};

}  // namespace autobatch

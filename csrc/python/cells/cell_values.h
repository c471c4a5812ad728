// Arguments and results of cells: tensors in nested structures (tuples, lists, dicts, named tuples,
// dataclasses), and other objects.
#pragma once

#include "autobatch/graph/signature.h"

#include <ATen/core/Tensor.h>

#include <Python.h>

#include <vector>

namespace autobatch {

// The arguments of one call, flattened: the tensors in order, and words that encode the structure
// and all other arguments.
class CellInputs {
 public:
  CellInputs() = default;
  CellInputs(const CellInputs&) = delete;
  CellInputs& operator=(const CellInputs&) = delete;
  ~CellInputs();

  // Returns false with a Python exception set on an error, such as an argument that is not
  // hashable.
  bool add_call(PyObject* function, PyObject* const* args, Py_ssize_t count, PyObject* names);

  // False if the call can't be captured because of an argument. Such an argument is of a subclass
  // of Tensor (other than nn.Parameter), list or dict, or is a dataclass instance with attributes
  // that are not fields.
  bool capturable() const { return capturable_; }
  // The tensors are borrowed from the call's arguments until hold() takes references to them. Call
  // hold() before the function runs; add_call() does so for arguments that can change, such as
  // lists.
  at::ArrayRef<at::Tensor> tensors() const { return tensors_; }
  void hold();
  at::ArrayRef<uint64_t> words() const { return words_; }
  // The objects whose addresses are among the words. Borrowed.
  at::ArrayRef<PyObject*> objects() const { return objects_; }
  // The nn.Modules among the objects, and the function itself or the object of a bound method if it
  // is an nn.Module. Borrowed.
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

// The structure of a result, to rebuild it from other tensors.
class OutputSpec {
 public:
  // Records the structure of the result, and appends its tensors. Returns false if the result can't
  // be rebuilt (it contains a mutable object), or on an error, with a Python exception set.
  bool describe(PyObject* value, std::vector<at::Tensor>& tensors, int depth = 0);
  // Returns a new reference; null with a Python exception set.
  PyObject* build(at::ArrayRef<at::Tensor> tensors) const;
  // Whether both have the same structure, with equal constants.
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

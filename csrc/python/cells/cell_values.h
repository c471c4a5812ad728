// What goes into a cell and comes out of it: tensors in nested structures (tuples, lists, dicts,
// named tuples, dataclasses), and everything else.
#pragma once

#include "autobatch/graph/signature.h"

#include <ATen/core/Tensor.h>

#include <Python.h>

#include <vector>

namespace autobatch {

// The arguments of one call, taken apart: its tensors in order, and words that say all the rest.
class CellInputs {
 public:
  CellInputs() = default;
  CellInputs(const CellInputs&) = delete;
  CellInputs& operator=(const CellInputs&) = delete;
  ~CellInputs();

  // False with a Python exception set on an error: an argument is not hashable.
  bool add_call(PyObject* function, PyObject* const* args, Py_ssize_t count, PyObject* names);

  // Whether all tensors are exactly torch.Tensor or nn.Parameter.
  bool capturable() const { return capturable_; }
  // Held by the call's arguments, and by this too where those can change (a list) or after hold():
  // before the function runs.
  at::ArrayRef<at::Tensor> tensors() const { return tensors_; }
  void hold();
  at::ArrayRef<uint64_t> words() const { return words_; }
  // Whose addresses are among the words. Borrowed.
  at::ArrayRef<PyObject*> objects() const { return objects_; }
  // Of these, the nn.Modules; the function's own and its methods' ones included.
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

// How a result is put together from tensors.
class OutputSpec {
 public:
  // Appends the result's tensors. False if it is of a kind that can't be made again, or with a
  // Python exception set.
  bool describe(PyObject* value, std::vector<at::Tensor>& tensors, int depth = 0);
  // A new reference; null with a Python exception set.
  PyObject* build(at::ArrayRef<at::Tensor> tensors) const;
  // Of the same structure, with equal constants.
  bool equals(const OutputSpec& other) const;
  void clear();  // with the interpreter's lock

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
  std::vector<PyObject*> names_;  // of a dict's values, of a dataclass's fields
  PyObject* object_ = nullptr;    // the constant; the type of a named tuple or dataclass
};

}  // namespace autobatch

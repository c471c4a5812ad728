#include "python/cells/cell_values.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <bit>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace autobatch {
namespace {

constexpr int kDeepest = 64;  // limit on the nesting depth, for structures that contain themselves

// The first word of each encoded value is a mark; the next words describe the rest of the value.
// The marks use bits that no word of a CallKey uses.
enum Mark : uint64_t {
  kNone_ = uint64_t{0x100} << 48,
  kTrue,
  kFalse,
  kInt,
  kFloat,
  kText,
  kObject,
  kTensor,
  kTuple,
  kList,
  kDict,
  kNamedTuple,
  kDataclass,
  kName,
};

PyTypeObject* module_type() {
  static PyObject* const type =
      py::object(py::module_::import("torch.nn").attr("Module")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

// Whether a dataclass instance has attributes that are not fields, such as attributes that
// `__post_init__` sets.
bool has_more_than(PyObject* fields, PyObject* instance) {
  const py::object dict =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(instance, nullptr));
  if (!dict) return PyErr_Clear(), false;  // the class has slots
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &name, &value) != 0;) {
    if (PyDict_GetItemWithError(fields, name) == nullptr) return true;
  }
  return false;
}

// Returns the fields of a dataclass instance as a borrowed reference. Returns null if the value is
// not a dataclass instance.
PyObject* fields_of(PyObject* value) {
  static PyObject* const name = PyUnicode_InternFromString("__dataclass_fields__");
  PyObject* fields = _PyType_Lookup(Py_TYPE(value), name);
  return fields != nullptr && PyDict_CheckExact(fields) ? fields : nullptr;
}

bool is_named_tuple(PyObject* value) {
  static PyObject* const name = PyUnicode_InternFromString("_fields");
  return PyTuple_Check(value) && _PyType_Lookup(Py_TYPE(value), name) != nullptr;
}

py::object own(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

}  // namespace

// The tensors are borrowed unless hold() was called. Changing the refcount of each argument at each
// call would take more time than all other code in this file.
CellInputs::~CellInputs() {
  if (owns_) return;
  for (at::Tensor& tensor : tensors_) tensor.unsafeReleaseTensorImpl();
}

void CellInputs::hold() {
  if (std::exchange(owns_, true)) return;
  for (const at::Tensor& tensor : tensors_) {
    c10::raw::intrusive_ptr::incref(tensor.unsafeGetTensorImpl());
  }
}

bool CellInputs::add_call(PyObject* function, PyObject* const* args, Py_ssize_t count,
                          PyObject* names) {
  if (PyObject_TypeCheck(function, module_type())) modules_.push_back(function);
  if (PyMethod_Check(function)) {
    PyObject* self = PyMethod_GET_SELF(function);
    if (PyObject_TypeCheck(self, module_type())) modules_.push_back(self);
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!add(args[i])) return false;
  }
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    words_.push_back(kName);
    add_text(PyTuple_GET_ITEM(names, i));
    if (!add(args[count + i])) return false;
  }
  return true;
}

bool CellInputs::add(PyObject* value) {
  if (!capturable_) return true;
  if (THPVariable_CheckExact(value)) {
    words_.push_back(kTensor);
    if (owns_) return tensors_.push_back(THPVariable_Unpack(value)), true;
    tensors_.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
        THPVariable_Unpack(value).unsafeGetTensorImpl()));
    return true;
  }
  if (value == Py_None) return words_.push_back(kNone_), true;
  if (value == Py_True) return words_.push_back(kTrue), true;
  if (value == Py_False) return words_.push_back(kFalse), true;
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return add_object(value);
    words_.push_back(kInt);
    words_.push_back(static_cast<uint64_t>(number));
    return true;
  }
  if (PyFloat_CheckExact(value)) {
    words_.push_back(kFloat);
    words_.push_back(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    return true;
  }
  if (PyUnicode_CheckExact(value)) return add_text(value), true;
  if (PyTuple_CheckExact(value)) return words_.push_back(kTuple), add_items(value);
  if (PyList_CheckExact(value)) {
    hold();
    words_.push_back(kList);
    return add_items(value);
  }
  if (PyDict_CheckExact(value)) return add_dict(value);
  if (is_named_tuple(value)) {
    words_.push_back(kNamedTuple);
    return add_object(reinterpret_cast<PyObject*>(Py_TYPE(value))) && add_items(value);
  }
  if (PyObject* fields = fields_of(value)) return add_fields(value, fields);
  // An instance of a subclass of Tensor, dict or list prevents the capture of the call.
  if (THPVariable_Check(value)) capturable_ = false;
  if (PyDict_Check(value) || PyList_Check(value)) return capturable_ = false, true;
  return add_object(value);
}

bool CellInputs::add_items(PyObject* sequence) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(sequence);
  words_.push_back(static_cast<uint64_t>(size));
  if (++depth_ > kDeepest) {
    PyErr_SetString(PyExc_RecursionError,
                    "torch_autobatch: a cell's argument is nested too deeply");
    return false;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!add(PySequence_Fast_GET_ITEM(sequence, i))) return false;
  }
  --depth_;
  return true;
}

bool CellInputs::add_dict(PyObject* dict) {
  hold();
  words_.push_back(kDict);
  words_.push_back(static_cast<uint64_t>(PyDict_GET_SIZE(dict)));
  if (++depth_ > kDeepest) {
    PyErr_SetString(PyExc_RecursionError,
                    "torch_autobatch: a cell's argument is nested too deeply");
    return false;
  }
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    if (THPVariable_Check(key)) capturable_ = false;
    if (!add(key) || !add(value)) return false;
  }
  --depth_;
  return true;
}

bool CellInputs::add_fields(PyObject* instance, PyObject* fields) {
  hold();
  words_.push_back(kDataclass);
  // Unlike a list, a dataclass instance that contains itself is a common argument (a node of a
  // graph or of a doubly linked list).
  if (++depth_ > kDeepest || has_more_than(fields, instance)) capturable_ = false;
  if (!add_object(reinterpret_cast<PyObject*>(Py_TYPE(instance)))) return false;
  PyObject *name = nullptr, *field = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(fields, &at, &name, &field) != 0;) {
    const py::object value = own(PyObject_GetAttr(instance, name));
    if (!value || !add(value.ptr())) return false;
  }
  --depth_;
  return true;
}

// Adds the address of an object to the words. So a call with another object is a call of another
// kind.
bool CellInputs::add_object(PyObject* object) {
  if (PyObject_TypeCheck(object, module_type())) {
    modules_.push_back(object);
  } else if (PyObject_Hash(object) == -1) {
    PyErr_Clear();
    PyErr_Format(
        PyExc_TypeError,
        "torch_autobatch: a cell got an argument of type '%.200s', which is not hashable. "
        "Arguments must be hashable objects, tensors, or tuples, lists, dicts, named tuples "
        "and dataclasses of these.",
        Py_TYPE(object)->tp_name);
    return false;
  }
  words_.push_back(kObject);
  words_.push_back(reinterpret_cast<uint64_t>(object));
  objects_.push_back(object);
  return true;
}

void CellInputs::add_text(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (data == nullptr) {  // the text contains lone surrogates, so its address is added
    PyErr_Clear();
    words_.push_back(kObject);
    words_.push_back(reinterpret_cast<uint64_t>(text));
    objects_.push_back(text);
    return;
  }
  words_.push_back(kText);
  append_string(words_, std::string_view(data, static_cast<size_t>(size)));
}

bool OutputSpec::describe(PyObject* value, std::vector<at::Tensor>& tensors, int depth) {
  if (depth > kDeepest) return false;
  if (THPVariable_CheckExact(value)) {
    kind_ = Kind::kTensor;
    tensors.push_back(THPVariable_Unpack(value));
    return true;
  }
  if (PyTuple_CheckExact(value)) return kind_ = Kind::kTuple, describe_items(value, tensors, depth);
  if (PyList_CheckExact(value)) return kind_ = Kind::kList, describe_items(value, tensors, depth);
  if (PyDict_CheckExact(value)) return describe_dict(value, tensors, depth);
  if (is_named_tuple(value)) {
    kind_ = Kind::kNamedTuple;
    object_ = Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(value)));
    return describe_items(value, tensors, depth);
  }
  if (PyObject* fields = fields_of(value)) return describe_dataclass(value, fields, tensors, depth);
  // Only immutable objects can be constants, because all calls return the same object.
  const bool constant = value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
                        PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
  if (constant) object_ = Py_NewRef(value);
  return constant;
}

bool OutputSpec::describe_items(PyObject* sequence, std::vector<at::Tensor>& tensors, int depth) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(sequence);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!parts_.emplace_back().describe(PySequence_Fast_GET_ITEM(sequence, i), tensors,
                                        depth + 1)) {
      return false;
    }
  }
  return true;
}

bool OutputSpec::describe_dict(PyObject* dict, std::vector<at::Tensor>& tensors, int depth) {
  kind_ = Kind::kDict;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    names_.push_back(Py_NewRef(key));
    if (!parts_.emplace_back().describe(value, tensors, depth + 1)) return false;
  }
  return true;
}

bool OutputSpec::describe_dataclass(PyObject* value, PyObject* fields,
                                    std::vector<at::Tensor>& tensors, int depth) {
  if (has_more_than(fields, value)) return false;
  kind_ = Kind::kDataclass;
  object_ = Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(value)));
  PyObject *name = nullptr, *field = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(fields, &at, &name, &field) != 0;) {
    const py::object part = own(PyObject_GetAttr(value, name));
    if (!part) return false;
    names_.push_back(Py_NewRef(name));
    if (!parts_.emplace_back().describe(part.ptr(), tensors, depth + 1)) return false;
  }
  return true;
}

PyObject* OutputSpec::build(at::ArrayRef<at::Tensor> tensors) const {
  const at::Tensor* next = tensors.data();
  return build(next);
}

PyObject* OutputSpec::build(const at::Tensor*& next) const {
  switch (kind_) {
    case Kind::kTensor:
      return THPVariable_Wrap(*next++);
    case Kind::kConstant:
      return Py_NewRef(object_);
    case Kind::kDict:
      return build_dict(next);
    case Kind::kDataclass:
      return build_dataclass(next);
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kNamedTuple:
      return build_sequence(next);
  }
  return nullptr;
}

PyObject* OutputSpec::build_sequence(const at::Tensor*& next) const {
  const auto size = static_cast<Py_ssize_t>(parts_.size());
  py::object out = own(kind_ == Kind::kList ? PyList_New(size) : PyTuple_New(size));
  if (!out) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* part = parts_[static_cast<size_t>(i)].build(next);
    if (part == nullptr) return nullptr;
    kind_ == Kind::kList ? PyList_SET_ITEM(out.ptr(), i, part)
                         : PyTuple_SET_ITEM(out.ptr(), i, part);
  }
  return kind_ == Kind::kNamedTuple ? PyObject_CallObject(object_, out.ptr()) : out.release().ptr();
}

PyObject* OutputSpec::build_dict(const at::Tensor*& next) const {
  py::object out = own(PyDict_New());
  if (!out) return nullptr;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const py::object part = own(parts_[i].build(next));
    if (!part || PyDict_SetItem(out.ptr(), names_[i], part.ptr()) < 0) return nullptr;
  }
  return out.release().ptr();
}

// Creates an instance of the dataclass in the same way as copy.copy: sets the fields and does not
// call `__init__`.
PyObject* OutputSpec::build_dataclass(const at::Tensor*& next) const {
  auto* type = reinterpret_cast<PyTypeObject*>(object_);
  const py::object none = own(PyTuple_New(0));
  py::object out = own(PyBaseObject_Type.tp_new(type, none.ptr(), nullptr));
  if (!out) return nullptr;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const py::object part = own(parts_[i].build(next));
    // This function is `object.__setattr__`, which also works for frozen dataclasses.
    if (!part || PyObject_GenericSetAttr(out.ptr(), names_[i], part.ptr()) < 0) return nullptr;
  }
  return out.release().ptr();
}

bool OutputSpec::equals(const OutputSpec& other) const {
  if (kind_ != other.kind_ || parts_.size() != other.parts_.size()) return false;
  const auto equal = [](PyObject* a, PyObject* b) {
    return a == b || (a != nullptr && b != nullptr && Py_TYPE(a) == Py_TYPE(b) &&
                      PyObject_RichCompareBool(a, b, Py_EQ) == 1);
  };
  if (!equal(object_, other.object_)) return false;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (i < names_.size() && !equal(names_[i], other.names_[i])) return false;
    if (!parts_[i].equals(other.parts_[i])) return false;
  }
  return true;
}

void OutputSpec::clear() {
  for (OutputSpec& part : parts_) part.clear();
  for (PyObject* name : names_) Py_DECREF(name);
  names_.clear();
  Py_CLEAR(object_);
}

}  // namespace autobatch

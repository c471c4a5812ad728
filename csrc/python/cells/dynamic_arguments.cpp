#include "python/cells/dynamic_arguments.h"

#include "autobatch/capture/capture.h"
#include "autobatch/graph/signature.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <bit>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace autobatch {
namespace {

constexpr int kDeepest = 32;         // limit on the nesting depth of containers
constexpr size_t kMostValues = 512;  // limit on the number of values that a search visits

// The first word of each encoded value is one of these marks.
enum Mark : uint64_t {
  kTensor = uint64_t{0x200} << 48,
  kParameter,
  kInt,
  kFixedInt,
  kLongInt,
  kTruth,
  kFloat,
  kText,
  kBytes,
  kNothing,
  kDtype,
  kDevice,
  kTuple,
  kNamedTuple,
  kSize,
  kRange,
  kContainer,
  kKnown,
  kReference,
  kObject,
  kSame,
};

// The bits of the number that torch_autobatch._cell_objects.flags_of returns for a class.
enum Flag : long {
  kHasAttributes = 1,  // the class is written in Python, and instances consist of their attributes
  kHasSlots = 2,       // instances have attributes outside their `__dict__`
  kRefused = 4,        // instances can be identified neither by value nor by address
  kNamed = 8,          // the class is a named tuple
};

py::object own(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

PyTypeObject* parameter_type() {
  static PyObject* const type =
      py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

long flags_of(PyTypeObject* type) {
  static PyObject* const flags =
      py::object(py::module_::import("torch_autobatch._cell_objects").attr("flags_of"))
          .release()
          .ptr();
  const py::object found = own(PyObject_CallOneArg(flags, reinterpret_cast<PyObject*>(type)));
  if (!found) throw python_error();
  return PyLong_AsLong(found.ptr());
}

bool is_fixed(PyObject* value) {
  if (PyTuple_CheckExact(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      if (!is_fixed(PyTuple_GET_ITEM(value, i))) return false;
    }
    return true;
  }
  return value == Py_None || PyLong_CheckExact(value) || PyBool_Check(value) ||
         PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value) ||
         THPDtype_Check(value) || THPDevice_Check(value);
}

// Calls `visit(key, item)` for each attribute of the object `value`, or for each item if `value` is
// a list, tuple or dict. If the object is a list or tuple, the key is null. `visit` must not change
// the container.
template <class Visit>
void each_item(PyObject* value, long flags, const Visit& visit) {
  if (PyList_Check(value) || PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      visit(nullptr, PySequence_Fast_GET_ITEM(value, i));
    }
    return;
  }
  py::object dict;
  if (PyDict_Check(value)) {
    dict = py::reinterpret_borrow<py::object>(value);
  } else if ((flags & kHasAttributes) != 0) {
    dict = own(PyObject_GenericGetDict(value, nullptr));
    if (!dict) throw python_error();
  } else {
    return;
  }
  PyObject *key = nullptr, *item = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &key, &item) != 0;) visit(key, item);
}

// Searches for a tensor in an object and in the objects that it contains.
class Search {
 public:
  bool finds_tensor(PyObject* value) {
    if (THPVariable_Check(value)) return true;
    const bool sequence = PyList_Check(value) || PyTuple_Check(value);
    const bool plain = sequence || PyDict_Check(value) || is_fixed(value);
    const long flags = plain ? 0 : flags_of(Py_TYPE(value));
    if (seen_.size() >= kMostValues || !seen_.insert(value).second) return false;
    bool found = false;
    each_item(value, flags,
              [&](PyObject*, PyObject* item) { found = found || finds_tensor(item); });
    return found;
  }

 private:
  std::unordered_set<PyObject*> seen_;
};

// Recognises an object that contains no tensors and is identified by its contents. An example is an
// empty cache, which a call fills. The object may contain lists, dicts, classes, constants other
// than ints and tuples, and objects with contents of these types.
class EmptyContainer {
 public:
  // Whether an argument is such an object. The object must contain a list or dict.
  bool is(PyObject* value, long flags) { return consists(value, flags) && has_container_; }
  // Whether an object in a container is such an object. The object only has to have attributes.
  bool is_within(PyObject* value, long flags) { return consists(value, flags) && values_ > 1; }

 private:
  static constexpr int kMost = 64;  // limit on the number of values in the object

  bool consists(PyObject* value, long flags) {
    if (++values_ > kMost || (flags & kHasSlots) != 0) return false;
    bool all = true;
    each_item(value, flags, [&](PyObject*, PyObject* item) { all = all && is_part(item); });
    return all;
  }

  bool is_part(PyObject* item) {
    if (PyType_Check(item)) return true;
    if (PyList_CheckExact(item) || PyDict_CheckExact(item)) {
      has_container_ = true;
      return consists(item, 0);
    }
    ++values_;
    if (is_fixed(item)) return !PyLong_CheckExact(item) && !PyTuple_CheckExact(item);
    const long flags = flags_of(Py_TYPE(item));
    return (flags & kHasAttributes) != 0 && consists(item, flags);
  }

  int values_ = 0;
  bool has_container_ = false;
};

class Arguments {
 public:
  // Adds the arguments of a call. Returns false if an argument can be identified neither by value
  // nor by address.
  bool add_call(PyObject* args, PyObject* kwargs) {
    words_.push_back(context_word());
    if (!add(args)) return false;
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value) != 0;) {
      if (!add_fixed(name) || !add(value)) return false;
    }
    add_same();
    return true;
  }

  PyObject* result() {
    const py::object key =
        py::bytes(reinterpret_cast<const char*>(words_.data()), words_.size() * sizeof(uint64_t));
    py::tuple inputs(inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i) inputs[i] = py::handle(inputs_[i]);
    py::dict containers, counts;
    for (const auto& [container, number] : containers_) containers[id(container)] = number;
    for (const auto& [container, count] : counts_) counts[id(container)] = count;
    py::list ints;
    for (const auto& [container, name, number] : ints_) {
      ints.append(py::make_tuple(py::handle(container), name, number));
    }
    return py::make_tuple(key, inputs, objects_, containers, ints, counts).release().ptr();
  }

 private:
  static py::int_ id(PyObject* object) { return py::int_(reinterpret_cast<uintptr_t>(object)); }

  bool add(PyObject* value) {
    PyTypeObject* type = Py_TYPE(value);
    if (THPVariable_CheckExact(value) && type != parameter_type()) return add_tensor(value);
    if (type == parameter_type()) {  // adds the address, because a module may contain it too
      add_held(kParameter, value);
      inputs_.push_back(value);
      return true;
    }
    if (PyLong_CheckExact(value)) {
      words_.push_back(kInt);
      inputs_.push_back(value);
      return true;
    }
    if (PyTuple_CheckExact(value)) return words_.push_back(kTuple), add_items(value);
    if (is_fixed(value)) return add_fixed(value);
    if (PyList_CheckExact(value) || PyDict_CheckExact(value)) return add_first(value, 0);
    if (THPSize_Check(value)) {
      words_.push_back(kSize);
      return add_fixed_items(value);
    }
    const long flags = flags_of(type);
    if ((flags & kNamed) != 0) {
      add_held(kNamedTuple, reinterpret_cast<PyObject*>(type));
      return add_items(value);
    }
    if (has_state(value, flags)) return add_first(value, flags);
    if (PyRange_Check(value)) return add_range(value);
    if ((flags & kRefused) != 0) return false;
    add_held(kObject, value);
    return true;
  }

  bool add_tensor(PyObject* value) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    words_.push_back(kTensor);
    words_.push_back(
        static_cast<uint64_t>(tensor.scalar_type()) | static_cast<uint64_t>(tensor.dim()) << 8 |
        static_cast<uint64_t>(tensor.requires_grad()) << 16 | device_word(tensor.device()) << 24);
    inputs_.push_back(value);
    return true;
  }

  static uint64_t device_word(const c10::Device& device) {
    return static_cast<uint64_t>(device.type()) << 8 |
           static_cast<uint64_t>(static_cast<uint8_t>(device.index()));
  }

  // Adds the address of an object to the key. `objects_` holds a reference to the object, so that
  // the address remains valid.
  void add_held(uint64_t mark, PyObject* object) {
    words_.push_back(mark);
    words_.push_back(reinterpret_cast<uint64_t>(object));
    objects_.append(py::handle(object));
  }

  bool add_items(PyObject* tuple) {
    words_.push_back(static_cast<uint64_t>(PyTuple_GET_SIZE(tuple)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      if (!add(PyTuple_GET_ITEM(tuple, i))) return false;
    }
    return true;
  }

  bool add_fixed_items(PyObject* tuple) {
    words_.push_back(static_cast<uint64_t>(PyTuple_GET_SIZE(tuple)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      if (!add_fixed(PyTuple_GET_ITEM(tuple, i))) return false;
    }
    return true;
  }

  bool add_range(PyObject* value) {
    words_.push_back(kRange);
    for (const char* name : {"start", "stop", "step"}) {
      const py::object part = own(PyObject_GetAttrString(value, name));
      if (!part || !add_fixed(part.ptr())) return false;
    }
    return true;
  }

  // Adds the value of a constant to the key. Returns false if the object is not a constant. A
  // traced number is not a constant.
  bool add_fixed(PyObject* value) {
    if (value == Py_None) return words_.push_back(kNothing), true;
    if (PyBool_Check(value)) return put(kTruth, value == Py_True ? 1 : 0);
    if (PyLong_CheckExact(value)) return add_fixed_int(value);
    if (PyFloat_CheckExact(value)) {
      return put(kFloat, std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    }
    if (PyUnicode_CheckExact(value)) return add_text(value);
    if (PyBytes_CheckExact(value)) {
      words_.push_back(kBytes);
      append_string(words_, {PyBytes_AS_STRING(value), static_cast<size_t>(Py_SIZE(value))});
      return true;
    }
    if (THPDtype_Check(value)) {
      const auto type = reinterpret_cast<THPDtype*>(value)->scalar_type;
      return put(kDtype, static_cast<uint64_t>(type));
    }
    if (THPDevice_Check(value)) {
      return put(kDevice, device_word(reinterpret_cast<THPDevice*>(value)->device));
    }
    if (!PyTuple_CheckExact(value)) return false;
    words_.push_back(kTuple);
    return add_fixed_items(value);
  }

  bool put(uint64_t mark, uint64_t word) {
    words_.push_back(mark);
    words_.push_back(word);
    return true;
  }

  bool add_fixed_int(PyObject* value) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0) return put(kFixedInt, static_cast<uint64_t>(number));
    words_.push_back(kLongInt);
    const py::object text = own(PyObject_Str(value));
    return text && add_text(text.ptr());
  }

  bool add_text(PyObject* text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) return PyErr_Clear(), false;  // the text contains lone surrogates
    words_.push_back(kText);
    append_string(words_, std::string_view(data, static_cast<size_t>(size)));
    return true;
  }

  static bool has_state(PyObject* value, long flags) {
    return (flags & kHasAttributes) != 0 &&
           (Search().finds_tensor(value) || EmptyContainer().is(value, flags));
  }

  static bool has_state_within(PyObject* value, long flags) {
    return has_state(value, flags) ||
           ((flags & kHasAttributes) != 0 && EmptyContainer().is_within(value, flags));
  }

  // Adds a container that is an argument or an item of a tuple.
  bool add_first(PyObject* value, long flags) {
    const size_t before = inputs_.size();
    if (!add_container(value, flags, 0)) return false;
    counts_.try_emplace(value, inputs_.size() - before);
    return true;
  }

  bool add_container(PyObject* value, long flags, int depth) {
    const auto [known, is_new] = containers_.try_emplace(value, inputs_.size());
    if (!is_new) return put(kKnown, known->second);
    if (depth > kDeepest || (flags & kHasSlots) != 0) return false;
    add_type(Py_TYPE(value));
    inputs_.push_back(value);
    bool all = true;
    each_item(value, flags, [&](PyObject* key, PyObject*) {
      all = all && (key == nullptr ? put(kKnown, 0) : add_fixed(key));
    });
    int64_t index = 0;
    each_item(value, flags, [&](PyObject* key, PyObject* item) {
      const py::object name =
          key == nullptr ? py::int_(index++) : py::reinterpret_borrow<py::object>(key);
      all = all && add_item(value, name, item, depth);
    });
    return all;
  }

  void add_type(PyTypeObject* type) {
    if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
      return add_held(kContainer, reinterpret_cast<PyObject*>(type));
    }
    put(kContainer, reinterpret_cast<uint64_t>(type));
  }

  bool add_item(PyObject* container, const py::object& name, PyObject* item, int depth) {
    if (PyLong_CheckExact(item)) {
      ints_.push_back({container, name, inputs_.size()});
      return add(item);
    }
    if (THPVariable_CheckExact(item)) return add(item);
    if (is_fixed(item)) return add_fixed(item);
    if (PyList_CheckExact(item) || PyDict_CheckExact(item))
      return add_container(item, 0, depth + 1);
    if (PyTuple_Check(item)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(item); ++i) {
        if (!THPVariable_Check(PyTuple_GET_ITEM(item, i))) return false;
      }
      return add(item);
    }
    if (PyWeakref_CheckRef(item)) {
      const py::object of = own(PyObject_CallNoArgs(item));
      const auto known = of ? containers_.find(of.ptr()) : containers_.end();
      if (known != containers_.end()) return put(kReference, known->second);
    }
    const long flags = flags_of(Py_TYPE(item));
    return has_state_within(item, flags) ? add_container(item, flags, depth + 1) : add(item);
  }

  // Adds words that tell which inputs are the same tensor.
  void add_same() {
    std::unordered_map<PyObject*, size_t> first;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!THPVariable_Check(inputs_[i])) continue;
      const auto [known, is_new] = first.try_emplace(inputs_[i], i);
      if (is_new) continue;
      words_.push_back(kSame);
      words_.push_back(i);
      words_.push_back(known->second);
    }
  }

  struct Int {
    PyObject* container;
    py::object name;
    size_t number;
  };

  Key words_;
  std::vector<PyObject*> inputs_;  // borrowed references
  py::list objects_;
  std::unordered_map<PyObject*, size_t> containers_, counts_;
  std::vector<Int> ints_;
};

}  // namespace

PyObject* take_apart(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyTuple_Check(args[0]) && PyDict_Check(args[1]),
                   "take_apart() takes a tuple and a dict");
  Arguments found;
  if (!found.add_call(args[0], args[1])) {
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
  }
  return found.result();
  END_HANDLE_TH_ERRORS
}

}  // namespace autobatch

#include "python/fastpath/module_attributes.h"

#include "python/fastpath/dict_version.h"

#include <torch/extension.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace autobatch {

Switch module_attributes_switch(Switch::Kind::kFastPath, "module_attributes");

namespace {

struct Names {
  PyObject* getattr = PyUnicode_InternFromString("__getattr__");
  PyObject* getattribute = PyUnicode_InternFromString("__getattribute__");
  PyObject* getitem = PyUnicode_InternFromString("__getitem__");
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* tables[3] = {PyUnicode_InternFromString("_parameters"),  // in nn.Module's search order
                         PyUnicode_InternFromString("_buffers"), modules};
};

// PyTorch's classes, and their slots before this library replaces them.
struct Original {
  Names names;
  PyTypeObject* module = type_of("Module");
  PyTypeObject* module_list = type_of("ModuleList");
  getattrofunc get_attribute = module->tp_getattro;
  binaryfunc get_item = module_list->tp_as_mapping->mp_subscript;
  PyObject* getattr = _PyType_Lookup(module, names.getattr);
  PyObject* getattribute = _PyType_Lookup(module, names.getattribute);
  PyObject* getitem = _PyType_Lookup(module_list, names.getitem);

  static PyTypeObject* type_of(const char* name) {
    py::object type = py::module_::import("torch.nn").attr(name);
    return reinterpret_cast<PyTypeObject*>(type.release().ptr());  // never released
  }
  static const Original& get() {
    static const auto* original = new Original();
    return *original;
  }
};

// Returns an item of a dict as a borrowed reference. If the item is missing, or if `dict` is not a
// dict, returns null with no exception set.
PyObject* item(PyObject* dict, PyObject* key) {
  if (dict == nullptr || !PyDict_CheckExact(dict)) return nullptr;
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr) PyErr_Clear();
  return found;
}

// The result of an attribute lookup in a module. The result is valid until the version of a
// searched dict changes. The searched dicts are the module's `__dict__` and the tables in it.
struct Finding {
  PyObject* name = nullptr;  // owned, so that no other name gets its address
  uint64_t version = 0;      // version of `__dict__`
  size_t num_tables = 0;
  std::array<PyObject*, 3> tables{};
  std::array<uint64_t, 3> table_versions{};
  PyObject* value = nullptr;

  // Returns the cache entry for the attribute. Several attributes may use the same entry.
  static Finding& of(const PyObject* dict, const PyObject* name) {
    static std::array<Finding, 256> table;  // the GIL guards the table
    const uintptr_t both = reinterpret_cast<uintptr_t>(dict) ^ reinterpret_cast<uintptr_t>(name)
                                                                   << 1;
    return table[both * 0x9E3779B97F4A7C15U >> 56];
  }

  bool holds(PyObject* dict, const PyObject* wanted) const {
    if (name != wanted || version == 0 || version != version_of(dict)) return false;
    for (size_t i = 0; i < num_tables; ++i) {
      if (version_of(tables[i]) != table_versions[i]) return false;
    }
    return true;
  }
};

// Returns an attribute as a borrowed reference. If the attribute is in neither the dict nor the
// tables, returns null with no exception set.
PyObject* find_attribute(PyObject* dict, PyObject* name) {
  Finding& finding = Finding::of(dict, name);
  if (finding.holds(dict, name)) {
    module_attributes_switch.add_uses(1);
    return finding.value;
  }
  Finding now{name, version_of(dict)};
  now.value = item(dict, name);
  for (PyObject* key : Original::get().names.tables) {
    if (now.value != nullptr) break;
    PyObject* table = item(dict, key);
    if (table == nullptr || !PyDict_CheckExact(table)) return nullptr;
    now.tables[now.num_tables] = table;
    now.table_versions[now.num_tables++] = version_of(table);
    now.value = item(table, name);
  }
  if (now.value != nullptr) {
    Py_INCREF(name);
    Py_XDECREF(finding.name);
    finding = now;
  }
  return now.value;
}

// The function in the tp_getattro slot of module classes.
PyObject* get_attribute(PyObject* self, PyObject* name) {
  const Original& original = Original::get();
  PyObject* of_class = _PyType_Lookup(Py_TYPE(self), name);
  // In the common case, the attribute is a method of the class. The generic lookup can't fail in
  // this case, so `__getattr__` is not needed.
  if (of_class != nullptr &&
      PyType_HasFeature(Py_TYPE(of_class), Py_TPFLAGS_METHOD_DESCRIPTOR) != 0) {
    return PyObject_GenericGetAttr(self, name);
  }
  if (of_class != nullptr) return original.get_attribute(self, name);
  PyObject* dict = PyObject_GenericGetDict(self, nullptr);
  if (dict == nullptr) {
    PyErr_Clear();
    return original.get_attribute(self, name);
  }
  PyObject* found = find_attribute(dict, name);
  Py_XINCREF(found);
  Py_DECREF(dict);
  return found != nullptr ? found : original.get_attribute(self, name);
}

// Whether the key is the decimal text of the number: "0", "1", ...
bool is_text_of(PyObject* key, size_t number) {
  if (!PyUnicode_CheckExact(key) || !PyUnicode_IS_COMPACT_ASCII(key)) return false;
  const auto* text = reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(key));
  Py_ssize_t i = PyUnicode_GET_LENGTH(key);
  do {
    if (i-- == 0 || text[i] != static_cast<char>('0' + number % 10)) return false;
    number /= 10;
  } while (number != 0);
  return i == 0;
}

// Returns the module with this index from a ModuleList's dict, as a borrowed reference. The keys of
// the dict are "0", "1", ..., mostly in this order. If there is no module with this index, returns
// null with no exception set.
PyObject* numbered_item(PyObject* modules, PyObject* index) {
  if (modules == nullptr || !PyDict_CheckExact(modules)) return nullptr;
  PyObject *key = nullptr, *found = nullptr;
  Py_ssize_t place = PyLong_AsSsize_t(index);
  if (place == -1) PyErr_Clear();  // the index is too large, or is -1
  if (place < 0) return nullptr;
  const auto number = static_cast<size_t>(place);
  if (PyDict_Next(modules, &place, &key, &found) != 0 && is_text_of(key, number)) return found;
  const auto text = py::reinterpret_steal<py::object>(PyObject_Str(index));
  if (!text) PyErr_Clear();
  return text ? item(modules, text.ptr()) : nullptr;
}

// The function in the mp_subscript slot of ModuleList.
PyObject* get_item(PyObject* self, PyObject* index) {
  const Original& original = Original::get();
  if (Py_TYPE(self) == original.module_list && PyLong_CheckExact(index) &&
      _PyType_Lookup(original.module_list, original.names.getitem) == original.getitem) {
    const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(self, nullptr));
    if (!dict) PyErr_Clear();
    PyObject* modules = dict ? find_attribute(dict.ptr(), original.names.modules) : nullptr;
    PyObject* found = numbered_item(modules, index);
    if (found != nullptr) return Py_NewRef(found);
  }
  return original.get_item(self, index);
}

// --- the classes ---

// A class derived from nn.Module.
class Class {
 public:
  explicit Class(const py::handle& type) : weak_(type) {}

  // Returns the class as a borrowed reference, which is valid until the GIL is released. Returns
  // null if the class has been freed.
  PyTypeObject* get() const {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* type = nullptr;
    if (PyWeakref_GetRef(weak_.ptr(), &type) <= 0) return nullptr;
    Py_DECREF(type);
#else
    PyObject* type = PyWeakref_GET_OBJECT(weak_.ptr());
    if (type == Py_None) return nullptr;
#endif
    return reinterpret_cast<PyTypeObject*>(type);
  }

  // Whether the class looks up attributes in the same way as nn.Module.
  bool is_ordinary(PyTypeObject* type) {
    if (type->tp_version_tag != version_ || version_ == 0) {
      const Original& original = Original::get();
      ordinary_ = type->tp_getattro == original.get_attribute &&
                  _PyType_Lookup(type, original.names.getattr) == original.getattr &&
                  _PyType_Lookup(type, original.names.getattribute) == original.getattribute;
      version_ = type->tp_version_tag;
    }
    return ordinary_;
  }

 private:
  py::weakref weak_;
  bool ordinary_ = false;
  unsigned version_ = 0;  // version of the class when ordinary_ was set; 0: not set yet
};

// The classes outside torch that are derived from nn.Module. The list is rebuilt only when the
// number of direct subclasses of nn.Module and of the listed classes has changed. nn.Module has
// several hundred subclasses. A search of all subclasses at each block takes more time than a small
// block saves.
class Classes {
 public:
  template <class F>
  void for_each(const F& visit) {
    for (Class& each : classes_) {
      if (PyTypeObject* type = each.get()) visit(each, type);
    }
  }

  void update() {
    Py_ssize_t now = count(Original::get().module);
    for_each([&](Class&, PyTypeObject* type) { now += count(type); });
    if (now == subclasses_) return;
    classes_.clear();
    subclasses_ = count(Original::get().module);
    add_subclasses_of(py::handle(reinterpret_cast<PyObject*>(Original::get().module)));
  }

 private:
  static Py_ssize_t count(PyTypeObject* type) {
    auto* subclasses = static_cast<PyObject*>(type->tp_subclasses);
    return subclasses != nullptr && PyDict_Check(subclasses) ? PyDict_GET_SIZE(subclasses) : 0;
  }

  void add_subclasses_of(const py::handle& type) {
    const py::object subclasses = type.attr("__subclasses__")();
    for (const py::handle subclass : subclasses) {
      const auto name = py::str(subclass.attr("__module__")).cast<std::string>();
      if (name.rfind("torch.", 0) != 0) {
        subclasses_ += count(reinterpret_cast<PyTypeObject*>(subclass.ptr()));
        classes_.emplace_back(subclass);
      }
      add_subclasses_of(subclass);
    }
  }

  std::vector<Class> classes_;
  Py_ssize_t subclasses_ = 0;
};

Classes& classes() {
  static auto* classes = new Classes();
  return *classes;
}

}  // namespace

void install_module_attributes() {
  const Original& original = Original::get();
  classes().update();
  classes().for_each([](Class& each, PyTypeObject* type) {
    if (each.is_ordinary(type)) type->tp_getattro = get_attribute;
  });
  if (_PyType_Lookup(original.module_list, original.names.getitem) == original.getitem) {
    original.module_list->tp_as_mapping->mp_subscript = get_item;
  }
}

void remove_module_attributes() {
  const Original& original = Original::get();
  classes().for_each([&](Class&, PyTypeObject* type) {
    if (type->tp_getattro == get_attribute) type->tp_getattro = original.get_attribute;
  });
  if (original.module_list->tp_as_mapping->mp_subscript == get_item) {
    original.module_list->tp_as_mapping->mp_subscript = original.get_item;
  }
}

}  // namespace autobatch

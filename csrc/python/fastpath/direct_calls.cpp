#include "python/fastpath/direct_calls.h"

#include "autobatch/capture/arguments.h"
#include "autobatch/capture/capture.h"
#include "autobatch/scope/payoff.h"
#include "python/fastpath/direct_names.h"
#include "python/fastpath/tensor_objects.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace autobatch {

Switch direct_calls_switch(Switch::Kind::kFastPath, "direct_calls");

namespace {

using Kind = Argument::Kind;

constexpr size_t kMostParameters = 8;

// --- an op, and the form of its arguments in Python ---

struct Parameter {
  Kind kind = Kind::kNone;   // accepted kind; kNone: only the default is accepted
  bool scalar = false;       // whether ints, floats and bools are accepted; `kind` is then not used
  PyObject* name = nullptr;  // null if the argument can't be passed by name
  bool positional = true;
  bool single = false;    // if `kind` is kInts: whether a single int is accepted
  bool optional = false;  // whether None is accepted
  bool number = false;    // whether a number is accepted in place of the tensor
  bool has_default = false;
  Argument standard;
};

struct Form {
  const OpInfo* op = nullptr;
  c10::SmallVector<Parameter, kMostParameters> parameters;
  size_t most_positional = 0;
  bool spreads = false;  // whether the last list may be passed as separate arguments: `view(2, 3)`
};

// Returns the kind of a parameter's type. Returns kNone if the type is not supported. For a
// parameter of an unsupported type, only the default is accepted.
Kind kind_of(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return Kind::kTensor;
  if (type.kind() == c10::TypeKind::IntType || type.kind() == c10::TypeKind::SymIntType) {
    return Kind::kInt;
  }
  if (type.kind() == c10::TypeKind::BoolType) return Kind::kBool;
  if (type.kind() == c10::TypeKind::FloatType) return Kind::kDouble;
  if (type.kind() == c10::TypeKind::StringType) return Kind::kString;
  if (type.kind() != c10::TypeKind::ListType) return Kind::kNone;
  switch (kind_of(*type.containedType(0))) {
    case Kind::kTensor:
      return Kind::kTensors;
    case Kind::kInt:
      return Kind::kInts;
    default:
      return Kind::kNone;
  }
}

// Sets the default of a parameter. Returns false if the value's type is not supported.
bool set_default(Parameter& parameter, const c10::IValue& value) {
  Argument& a = parameter.standard;
  if (value.isInt()) {
    a.kind = Kind::kInt;
    a.integer = value.toInt();
  } else if (value.isBool()) {
    a.kind = Kind::kBool;
    a.integer = value.toBool() ? 1 : 0;
  } else if (value.isDouble()) {
    a.kind = Kind::kDouble;
    a.number = value.toDouble();
  } else if (value.isString()) {  // the schema owns the text, and is never freed
    a.kind = Kind::kString;
    a.text = value.toStringRef().data();
    a.size = value.toStringRef().size();
  } else if (!value.isNone()) {
    return false;
  }
  return true;
}

// In some ops, such as factories, the default of PyTorch's binding differs from the schema's
// default. Sets the binding's default for these ops.
void set_default_of_binding(const std::string& op, const std::string& name, Parameter& parameter) {
  if (op.starts_with("new_") && name == "pin_memory") parameter.standard.kind = Kind::kBool;
}

Form form_of(const std::string& name) {
  const size_t dot = name.find('.');
  Form form;
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  form.op = &find_op(("aten::" + name.substr(0, dot)).c_str(), overload.c_str());
  for (const c10::Argument& argument : form.op->handle.schema().arguments()) {
    Parameter& p = form.parameters.emplace_back();
    const c10::Type& type = *argument.type();
    p.optional = type.kind() == c10::TypeKind::OptionalType;
    const c10::Type& given = p.optional ? *type.containedType(0) : type;
    p.kind = kind_of(given);
    p.scalar = given.kind() == c10::TypeKind::NumberType;
    // The name object is never released. A schema's `self` has another name in Python (`input`).
    if (argument.name() != "self") p.name = PyUnicode_InternFromString(argument.name().c_str());
    p.single = argument.N() == 1;
    p.positional = !argument.kwarg_only();
    p.has_default =
        argument.default_value().has_value() && set_default(p, *argument.default_value());
    set_default_of_binding(name, argument.name(), p);
    if (p.positional) ++form.most_positional;
  }
  TORCH_INTERNAL_ASSERT(form.parameters.size() <= kMostParameters);
  form.spreads = form.most_positional == 2 && form.parameters[1].kind == Kind::kInts &&
                 !form.parameters[1].optional;
  return form;
}

// The arguments of a vectorcall.
struct Given {
  PyObject* const* values;  // positional arguments, followed by keyword arguments
  size_t count;             // number of positional arguments
  PyObject* names;          // names of the keyword arguments: a tuple, or null
};

// The arguments of one call, converted for capture. The arguments contain pointers to the objects
// of the call.
class Arguments {
 public:
  // Reads the arguments of a call. Returns false if the arguments are not plain, or if they do not
  // match the form.
  bool read(const Form& form, const Given& given) {
    std::array<PyObject*, kMostParameters> values{};
    const bool spread = form.spreads && given.count > 1 && !is_sequence(given.values[1]);
    if (!spread && given.count > form.most_positional) return false;
    std::copy_n(given.values, spread ? 1 : given.count, values.begin());
    if (given.names != nullptr && !read_names(form, given, values)) return false;
    for (size_t i = 0; i < form.parameters.size(); ++i) {
      const Parameter& parameter = form.parameters[i];
      Argument& argument = arguments_.emplace_back();
      if (spread && i == 1) {
        if (values[i] != nullptr || !read_integers({given.values + 1, given.count - 1}, argument))
          return false;
      } else if (values[i] == nullptr) {
        if (!parameter.has_default) return false;
        argument = parameter.standard;
      } else if (!read_value(parameter, values[i], argument)) {
        return false;
      }
    }
    return true;
  }

  at::ArrayRef<Argument> get() const { return arguments_; }

 private:
  static bool read_names(const Form& form, const Given& given,
                         std::array<PyObject*, kMostParameters>& values) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(given.names); ++k) {
      PyObject* name = PyTuple_GET_ITEM(given.names, k);
      size_t i = 0;
      while (i < form.parameters.size() && form.parameters[i].name != name) ++i;
      if (i == form.parameters.size() || values[i] != nullptr) return false;
      values[i] = given.values[given.count + static_cast<size_t>(k)];
    }
    return true;
  }

  static bool read_integer(PyObject* value, int64_t& integer) {
    if (PyLong_CheckExact(value) == 0) return false;
    int overflow = 0;
    integer = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
  }

  static bool read_double(PyObject* value, Argument& argument) {
    if (PyFloat_CheckExact(value) == 0) return false;
    argument.kind = Kind::kDouble;
    argument.number = PyFloat_AS_DOUBLE(value);
    return true;
  }

  static bool read_bool(PyObject* value, Argument& argument) {
    argument.kind = Kind::kBool;
    argument.integer = value == Py_True ? 1 : 0;
    return value == Py_True || value == Py_False;
  }

  static bool read_scalar(PyObject* value, Argument& argument) {
    if (read_double(value, argument) || read_bool(value, argument)) return true;
    argument.kind = Kind::kInt;
    return read_integer(value, argument.integer);
  }

  static bool read_string(PyObject* value, Argument& argument) {
    if (PyUnicode_CheckExact(value) == 0) return false;
    Py_ssize_t size = 0;
    argument.text = PyUnicode_AsUTF8AndSize(value, &size);
    argument.size = static_cast<size_t>(size);
    if (argument.text == nullptr) PyErr_Clear();
    return argument.text != nullptr;
  }

  static bool read_number(PyObject* value, Argument& argument) {
    if (PyFloat_CheckExact(value) != 0) {
      argument.kind = Kind::kDoubleTensor;
      argument.number = PyFloat_AS_DOUBLE(value);
      return true;
    }
    argument.kind = Kind::kIntTensor;
    return read_integer(value, argument.integer);
  }

  bool read_value(const Parameter& parameter, PyObject* value, Argument& argument) {
    if (value == Py_None) return parameter.optional;  // `argument` still represents None
    if (parameter.scalar) return read_scalar(value, argument);
    argument.kind = parameter.kind;
    switch (parameter.kind) {
      case Kind::kTensor:
        if (!THPVariable_CheckExact(value)) return parameter.number && read_number(value, argument);
        argument.tensor = &THPVariable_Unpack(value);
        return true;
      case Kind::kTensors:
        return is_sequence(value) && read_tensors(items(value), argument);
      case Kind::kInt:
        return read_integer(value, argument.integer);
      case Kind::kInts:
        if (is_sequence(value)) return read_integers(items(value), argument);
        return parameter.single && read_integers({&value, 1}, argument);
      case Kind::kBool:
        return read_bool(value, argument);
      case Kind::kDouble:
        return read_double(value, argument);
      case Kind::kString:
        return read_string(value, argument);
      default:
        return false;
    }
  }

  static bool is_sequence(PyObject* value) {
    return PyTuple_CheckExact(value) != 0 || PyList_CheckExact(value) != 0;
  }
  static std::span<PyObject* const> items(PyObject* sequence) {
    return {PySequence_Fast_ITEMS(sequence),
            static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence))};
  }

  // No op in the table has two parameters that are lists of tensors, so one buffer is enough.
  bool read_tensors(std::span<PyObject* const> values, Argument& argument) {
    for (PyObject* value : values) {
      if (!THPVariable_CheckExact(value)) return false;
      tensors_.push_back(&THPVariable_Unpack(value));
    }
    argument.tensors = tensors_.data();
    argument.size = tensors_.size();
    return true;
  }

  bool read_integers(std::span<PyObject* const> values, Argument& argument) {
    argument.kind = Kind::kInts;
    for (PyObject* value : values) {
      if (!read_integer(value, integers_.emplace_back())) return false;
    }
    argument.integers = integers_.data();
    argument.size = integers_.size();
    return true;
  }

  c10::SmallVector<Argument, kMostParameters> arguments_;
  c10::SmallVector<const at::Tensor*, 8> tensors_;
  c10::SmallVector<int64_t, 8> integers_;
};

// Returns the results in the form that PyTorch's bindings return: one tensor, or a tuple.
PyObject* objects_of(Graph& graph, at::ArrayRef<ValueId> results, bool list) {
  if (!list && results.size() == 1) return new_tensor_object(graph, results[0]);
  auto out =
      py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  if (!out) throw python_error();
  for (size_t i = 0; i < results.size(); ++i) {
    PyTuple_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), new_tensor_object(graph, results[i]));
  }
  return out.release().ptr();
}

// Returns true if the call was captured or raised an error. In this case `result` is the value to
// return, or null if there was an error. captured() needs no warning handler, because it calls no
// code that emits warnings.
bool captured(const Form& form, const Arguments& arguments, PyObject*& result) {
  try {
    result = from_cache(*form.op, arguments.get());
    if (result == nullptr) return false;
    direct_calls_switch.add_uses(1);
    return true;
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return true;
  }
}

// --- methods and functions ---

// The replacement of one method or function of the table. If a method has no arguments, its C
// function (ml_meth) is exchanged, because the interpreter may call the C function directly. In all
// other methods and functions the vectorcall slot is exchanged. The C function of a builtin must
// not change, because Python uses the C function to compare and hash builtin functions.
struct Direct {
  PyCFunction* alone = nullptr;  // the ml_meth to exchange, or null
  PyCFunction original_alone = nullptr;
  PyCFunction ours_alone = nullptr;
  vectorcallfunc* call = nullptr;     // the vectorcall slot to exchange, or null
  vectorcallfunc original = nullptr;  // null: the tp_call of the function's class is called
  vectorcallfunc ours = nullptr;
  std::vector<Form> forms;
  bool for_tensors = true;  // whether is_captured_for_tensors() is true for all forms
};

std::array<Direct, std::size(kNames)>& directs() {
  static auto* all = new std::array<Direct, std::size(kNames)>();
  return *all;
}

// Whether the call may have to be captured. Returns true if an argument is a pending tensor,
// requires grad, or is not examined here. Most calls whose tensors are all plain data are not
// captured. For these calls, this test avoids converting the arguments.
bool may_be_captured(const Given& given) {
  for (size_t i = 0; i < given.count; ++i) {
    PyObject* value = given.values[i];
    if (!THPVariable_CheckExact(value)) {
      if (PyTuple_CheckExact(value) || PyList_CheckExact(value) || THPVariable_Check(value)) {
        return true;
      }
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (tensor.key_set().has(compat::kDeferKey) || tensor.requires_grad()) return true;
  }
  return given.names != nullptr;
}

bool captured(const Direct& direct, const Given& given, PyObject*& result) {
  if (!count_call()) return false;
  if (direct.for_tensors && !may_be_captured(given) && !captures_data()) return false;
  if (at::impl::torch_function_mode_enabled()) return false;
  for (const Form& form : direct.forms) {
    Arguments arguments;
    if (arguments.read(form, given)) return captured(form, arguments, result);
  }
  return false;
}

template <size_t kName>
PyObject* call_alone(PyObject* self, PyObject* nothing) {
  const Direct& direct = directs()[kName];
  PyObject* result = nullptr;
  if (captured(direct, {&self, 1, nullptr}, result)) return result;
  return direct.original_alone(self, nothing);
}

template <size_t kName>
PyObject* call(PyObject* function, PyObject* const* values, size_t count, PyObject* names) {
  const Direct& direct = directs()[kName];
  const Given given{values, static_cast<size_t>(PyVectorcall_NARGS(count)), names};
  PyObject* result = nullptr;
  if (captured(direct, given, result)) return result;
  return call_original(direct.original, function, values, count, names);
}

// Returns the method or function with this name, or null if it does not exist.
py::object find(const DirectName& name) {
  if (name.binding == Binding::kMethod) {
    return py::reinterpret_borrow<py::object>(_PyType_Lookup(
        reinterpret_cast<PyTypeObject*>(THPVariableClass), py::str(name.name).ptr()));
  }
  const char* where = name.binding == Binding::kNN ? "_nn" : "_VariableFunctions";
  return py::getattr(py::module_::import("torch._C").attr(where), name.name, py::object());
}

template <size_t kName>
void prepare() {
  constexpr int kPlain = METH_VARARGS | METH_KEYWORDS;
  Direct& direct = directs()[kName];
  PyObject* found = find(kNames[kName]).release().ptr();  // the reference is never released
  if (found != nullptr && Py_IS_TYPE(found, &PyMethodDescr_Type)) {
    auto* method = reinterpret_cast<PyMethodDescrObject*>(found);
    if (method->d_method->ml_flags == METH_NOARGS) direct.alone = &method->d_method->ml_meth;
    if (method->d_method->ml_flags == kPlain) direct.call = &method->vectorcall;
  } else if (found != nullptr && PyCFunction_CheckExact(found)) {
    auto* function = reinterpret_cast<PyCFunctionObject*>(found);
    if ((function->m_ml->ml_flags & ~METH_STATIC) == kPlain) direct.call = &function->vectorcall;
  }
  if (direct.alone != nullptr) direct.original_alone = *direct.alone;
  if (direct.call != nullptr) direct.original = *direct.call;
  direct.ours_alone = call_alone<kName>;
  direct.ours = call<kName>;
  for (const char* op : kNames[kName].ops) {
    if (op == nullptr) continue;
    direct.forms.push_back(form_of(op));
    direct.for_tensors &= is_captured_for_tensors(*direct.forms.back().op);
    if (kNames[kName].number) direct.forms.back().parameters[1].number = true;
    for (Parameter& parameter : direct.forms.back().parameters) {
      if (kNames[kName].whole) parameter.has_default = false;
    }
  }
}

template <size_t... kName>
void prepare_all(std::index_sequence<kName...>) {
  (prepare<kName>(), ...);
}

}  // namespace

PyObject* from_cache(const OpInfo& op, at::ArrayRef<Argument> arguments) {
  PyObject* objects = nullptr;
  try_cached_call(op, arguments, [&](Graph& graph, at::ArrayRef<ValueId> results, bool list) {
    objects = objects_of(graph, results, list);
  });
  return objects;
}

PyObject* call_original(vectorcallfunc original, PyObject* function, PyObject* const* values,
                        size_t count, PyObject* names) {
  if (original != nullptr) return original(function, values, count, names);
  const auto given = static_cast<size_t>(PyVectorcall_NARGS(count));
  const auto args = py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(given)));
  if (!args) return nullptr;
  for (size_t i = 0; i < given; ++i) {
    PyTuple_SET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(values[i]));
  }
  py::object named;
  if (names != nullptr && PyTuple_GET_SIZE(names) != 0) {
    named = py::reinterpret_steal<py::object>(PyDict_New());
    if (!named) return nullptr;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); ++k) {
      PyObject* value = values[given + static_cast<size_t>(k)];
      if (PyDict_SetItem(named.ptr(), PyTuple_GET_ITEM(names, k), value) < 0) return nullptr;
    }
  }
  return Py_TYPE(function)->tp_call(function, args.ptr(), named.ptr());
}

void install_direct_calls() {
  static const bool prepared = [] {
    prepare_all(std::make_index_sequence<std::size(kNames)>());
    return true;
  }();
  (void)prepared;
  for (const Direct& direct : directs()) {
    if (direct.alone != nullptr) *direct.alone = direct.ours_alone;
    if (direct.call != nullptr) *direct.call = direct.ours;
  }
}

void remove_direct_calls() {
  for (const Direct& direct : directs()) {
    if (direct.alone != nullptr) *direct.alone = direct.original_alone;
    if (direct.call != nullptr) *direct.call = direct.original;
  }
}

}  // namespace autobatch

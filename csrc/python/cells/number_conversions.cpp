#include "python/cells/number_conversions.h"

namespace autobatch {

Switch number_conversions_switch(Switch::Kind::kFastPath, "number_conversions");

namespace {

thread_local PyObject* convert_in_trace = nullptr;  // an owned reference, or null
int num_traces = 0;                                 // traces of all threads; guarded by the GIL

// The original slots of a type. Python calls the type through the slot `call` if the type has this
// slot (in some versions of Python), and through the slot `make` otherwise.
struct Slots {
  vectorcallfunc call = nullptr;
  newfunc make = nullptr;
};
Slots of_int, of_float;

// Returns the number that the trace uses for the value. Returns null with no exception set if the
// trace has no such number.
PyObject* convert(PyObject* type, PyObject* value) {
  const bool is_ordinary = PyLong_CheckExact(value) != 0 || PyFloat_CheckExact(value) != 0 ||
                           PyUnicode_CheckExact(value) != 0 || PyBool_Check(value) != 0;
  if (convert_in_trace == nullptr || is_ordinary) return nullptr;
  PyObject* const result = PyObject_CallFunctionObjArgs(convert_in_trace, type, value, nullptr);
  if (result == Py_NotImplemented) {
    Py_DECREF(result);
    return nullptr;
  }
  if (result != nullptr) number_conversions_switch.add_uses(1);
  return result;
}

template <Slots& original>
PyObject* call(PyObject* type, PyObject* const* values, size_t count, PyObject* names) {
  if (PyVectorcall_NARGS(count) == 1 && names == nullptr) {
    PyObject* const result = convert(type, values[0]);
    if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  }
  return original.call(type, values, count, names);
}

// `of` is a subclass if the call constructs an instance of a subclass.
template <PyTypeObject& type, Slots& original>
PyObject* make(PyTypeObject* of, PyObject* values, PyObject* names) {
  if (of == &type && PyTuple_GET_SIZE(values) == 1 && names == nullptr) {
    auto* const object = reinterpret_cast<PyObject*>(of);
    PyObject* const result = convert(object, PyTuple_GET_ITEM(values, 0));
    if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  }
  return original.make(of, values, names);
}

template <PyTypeObject& type, Slots& original>
void install() {
  original = {type.tp_vectorcall, type.tp_new};
  type.tp_new = &make<type, original>;
  if (original.call != nullptr) type.tp_vectorcall = &call<original>;
}

void remove(PyTypeObject& type, const Slots& original) {
  type.tp_vectorcall = original.call;
  type.tp_new = original.make;
}

}  // namespace

void trace_conversions(PyObject* convert) {
  const bool was_set = convert_in_trace != nullptr;
  if (!was_set && !number_conversions_switch.is_on()) return;
  PyObject* const before = convert_in_trace;
  Py_XINCREF(convert);
  convert_in_trace = convert;
  Py_XDECREF(before);
  if (!was_set && convert != nullptr && ++num_traces == 1) {
    install<PyLong_Type, of_int>();
    install<PyFloat_Type, of_float>();
  }
  if (was_set && convert == nullptr && --num_traces == 0) {
    remove(PyLong_Type, of_int);
    remove(PyFloat_Type, of_float);
  }
}

}  // namespace autobatch

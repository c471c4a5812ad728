#include "python/fastpath/number_tensors.h"

#include "autobatch/capture/capture.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/varying_numbers.h"
#include "autobatch/scope/payoff.h"
#include "python/fastpath/direct_calls.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/clone.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace autobatch {

Switch number_tensors_switch(Switch::Kind::kFastPath, "number_tensors");

namespace {

struct Number {
  at::Scalar value;
  c10::ScalarType dtype = c10::kFloat;
};

// Returns the number with PyTorch's default dtype for its Python type. Returns nothing if the
// object is not a number.
std::optional<Number> number_of(PyObject* object) {
  if (PyFloat_CheckExact(object) != 0) {
    return Number{PyFloat_AS_DOUBLE(object), c10::get_default_dtype_as_scalartype()};
  }
  if (PyBool_Check(object) != 0) return Number{object == Py_True, c10::kBool};
  if (PyLong_CheckExact(object) == 0) return {};
  int overflow = 0;
  const int64_t integer = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) return {};
  return Number{integer, c10::kLong};
}

// Reads the option `dtype` or `device`. Returns false for other options and for devices other than
// the CPU. The dtype must be the dtype of the number, float32 or float64. For other dtypes, returns
// false.
bool read_option(std::string_view name, PyObject* value, Number& number) {
  if (value == Py_None) return name == "dtype" || name == "device";
  if (name == "device") {
    if (PyUnicode_CheckExact(value) != 0)
      return PyUnicode_CompareWithASCIIString(value, "cpu") == 0;
    return THPDevice_Check(value) &&
           reinterpret_cast<THPDevice*>(value)->device == c10::Device(c10::kCPU);
  }
  if (name != "dtype" || !THPDtype_Check(value)) return false;
  const c10::ScalarType dtype = reinterpret_cast<THPDtype*>(value)->scalar_type;
  const bool is_float = dtype == c10::kFloat || dtype == c10::kDouble;
  if (!is_float && (dtype != number.dtype || number.value.isFloatingPoint())) return false;
  if (is_float) number.value = number.value.toDouble();  // rounds twice, as PyTorch does
  number.dtype = dtype;
  return true;
}

bool fits(const Number& number) {
  if (number.dtype == c10::kDouble || !number.value.isFloatingPoint()) return true;
  return number.dtype == c10::kFloat && fits_in_float32(number.value.toDouble());
}

std::optional<Number> read(PyObject* const* values, size_t count, PyObject* names) {
  if (count != 1) return {};
  std::optional<Number> number = number_of(values[0]);
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t k = 0; number.has_value() && k < named; ++k) {
    Py_ssize_t size = 0;
    const char* name = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(names, k), &size);
    if (name == nullptr) throw py::error_already_set();
    const std::string_view option(name, static_cast<size_t>(size));
    if (!read_option(option, values[1 + k], *number)) return {};
  }
  if (number.has_value() && !fits(*number)) return {};
  return number;
}

// Creates an ordinary tensor, and returns a captured copy of this tensor. Copies of different
// numbers run as one batch, and the user can write to each copy.
PyObject* captured_number(const Number& number) {
  number_tensors_switch.add_uses(1);
  at::Tensor tensor;
  {
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    tensor = at::detail::scalar_tensor_static(number.value, number.dtype, c10::kCPU);
  }
  static const OpInfo& clone = find_op("aten::clone", "");
  const std::array<Argument, 2> arguments{argument(tensor), Argument()};
  if (PyObject* known = from_cache(clone, arguments)) return known;
  struct DataGuard {
    bool before = set_captures_data(true);
    ~DataGuard() { set_captures_data(before); }
  } const captures_data;
  return THPVariable_Wrap(at::clone(tensor));
}

// A function of PyTorch and its original vectorcall.
struct Patched {
  PyCFunctionObject* function = nullptr;  // the reference is never released
  vectorcallfunc original = nullptr;
};
std::array<Patched, 2> patched;

template <size_t k>
PyObject* call(PyObject* function, PyObject* const* values, size_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  if (count_call() && !at::impl::torch_function_mode_enabled() && captures_numbers()) {
    const auto number = read(values, static_cast<size_t>(PyVectorcall_NARGS(count)), names);
    if (number.has_value()) return captured_number(*number);
  }
  return call_original(patched[k].original, function, values, count, names);
  END_HANDLE_TH_ERRORS
}

template <size_t k>
void prepare(const char* name) {
  const py::object functions = py::module_::import("torch._C").attr("_VariableFunctions");
  PyObject* found = py::getattr(functions, name, py::object()).release().ptr();
  if (found == nullptr || !PyCFunction_CheckExact(found)) return;
  patched[k].function = reinterpret_cast<PyCFunctionObject*>(found);
  patched[k].original = patched[k].function->vectorcall;
}

}  // namespace

void install_number_tensors() {
  static const bool prepared = (prepare<0>("tensor"), prepare<1>("as_tensor"), true);
  (void)prepared;
  if (patched[0].function != nullptr) patched[0].function->vectorcall = &call<0>;
  if (patched[1].function != nullptr) patched[1].function->vectorcall = &call<1>;
}

void remove_number_tensors() {
  for (const Patched& one : patched) {
    if (one.function != nullptr) one.function->vectorcall = one.original;
  }
}

}  // namespace autobatch

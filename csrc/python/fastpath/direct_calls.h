// A short way from Python to capture. PyTorch's bindings parse arguments for any overload, let the
// interpreter's lock go and ask the dispatcher: for `x * y` that is more than capturing it takes.
// While a block is open, the methods (operators among them) and functions that models call most
// have C functions of our own behind them, which capture the call if it is plain (exact tensors and
// numbers, no option that the table does not know) and one like it was captured before. Whatever
// else, other threads' calls included, goes on to PyTorch's, with the arguments as they came.
#pragma once

#include "autobatch/capture/cached_call.h"

#include <Python.h>

namespace autobatch {

// Both need the interpreter's lock, and raise Python's exceptions as py::error_already_set.
void install_direct_calls();
void remove_direct_calls();

// What a call gives that is captured as the last one like it; null, with no exception set, if it is
// not. Needs the interpreter's lock.
PyObject* recalled(const OpInfo& op, at::ArrayRef<Argument> arguments);

// Calls PyTorch's function by the vectorcall that it had; by its type, as Python does, if it had
// none. Needs the interpreter's lock.
PyObject* call_original(vectorcallfunc original, PyObject* function, PyObject* const* values,
                        size_t count, PyObject* names);

inline Argument argument(const at::Tensor& tensor) {  // which may be undefined
  Argument a;
  a.kind = Argument::Kind::kTensor;
  a.tensor = &tensor;
  return a;
}

inline Argument argument(at::ArrayRef<const at::Tensor*> tensors) {
  Argument a;
  a.kind = Argument::Kind::kTensors;
  a.tensors = tensors.data();
  a.size = tensors.size();
  return a;
}

inline Argument argument(int64_t integer) {
  Argument a;
  a.kind = Argument::Kind::kInt;
  a.integer = integer;
  return a;
}

inline Argument argument(bool flag) {
  Argument a;
  a.kind = Argument::Kind::kBool;
  a.integer = flag ? 1 : 0;
  return a;
}

}  // namespace autobatch

// A fast path from Python to capture. PyTorch's bindings parse the arguments for any overload,
// release the GIL and call the dispatcher. For `x * y` these steps take longer than capturing the
// call. So while a block is open, this library replaces the C functions of the methods, operators
// and functions that models call most often. The replacement captures a call if the call is plain
// and a call with the same key was captured before. In a plain call, no tensor or number is an
// instance of a subclass, and the table lists all options that are passed. All other calls,
// including calls of other threads, are passed to PyTorch's function with unchanged arguments.
#pragma once

#include "autobatch/capture/try_cached_call.h"
#include "autobatch/common/switches.h"

#include <Python.h>

namespace autobatch {

// Both functions need the GIL, and raise Python's exceptions as py::error_already_set.
extern Switch direct_calls_switch;

void install_direct_calls();
void remove_direct_calls();

// If a call with the same key is cached (CachedCall), captures the call and returns its results as
// a new reference. If no such call is cached, returns null with no exception set. Needs the GIL.
PyObject* from_cache(const OpInfo& op, at::ArrayRef<Argument> arguments);

// Calls PyTorch's function by its original vectorcall. If the function had no vectorcall, calls the
// function by the tp_call of its type. Needs the GIL.
PyObject* call_original(vectorcallfunc original, PyObject* function, PyObject* const* values,
                        size_t count, PyObject* names);

inline Argument argument(const at::Tensor& tensor) {  // the tensor may be undefined
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

// A fast path from Python to capture. PyTorch's bindings parse the arguments for any overload,
// release the GIL and call the dispatcher: for `x * y` this takes longer than capturing the call.
// While a block is open, C functions of this library replace the C functions of the methods
// (operators among them) and functions that models call most. Such a function captures a call if
// the call is plain and a call with the same key was captured before. A plain call has exact
// tensors and numbers, and no option that is missing in the table. All other calls, including calls
// of other threads, are passed to PyTorch's function with their arguments unchanged.
#pragma once

#include "autobatch/capture/try_cached_call.h"
#include "autobatch/common/switches.h"

#include <Python.h>

namespace autobatch {

// Both functions need the GIL, and raise Python's exceptions as py::error_already_set.
extern Switch direct_calls_switch;

void install_direct_calls();
void remove_direct_calls();

// Captures the call if a call with the same key is cached (CachedCall), and returns its results as
// a new reference. Returns null, with no exception set, if there is none. Needs the GIL.
PyObject* from_cache(const OpInfo& op, at::ArrayRef<Argument> arguments);

// Calls PyTorch's function by its original vectorcall, or by its type's tp_call if it had none.
// Needs the GIL.
PyObject* call_original(vectorcallfunc original, PyObject* function, PyObject* const* values,
                        size_t count, PyObject* names);

inline Argument argument(const at::Tensor& tensor) {  // may be undefined
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

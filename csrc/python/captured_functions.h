// Captures custom autograd.Functions op by op: the host of rules/captured_function.h. The rest is
// in python/torch_autobatch/_function_capture.py.
#pragma once

#include <Python.h>

namespace autobatch {

void bind_captured_functions(PyObject* module);

}  // namespace autobatch

// Captures calls of custom autograd.Functions op by op. Connects rules/captured_function.h with the
// Python code in python/torch_autobatch/_function_capture.py.
#pragma once

#include <Python.h>

namespace autobatch {

void bind_captured_functions(PyObject* module);

}  // namespace autobatch

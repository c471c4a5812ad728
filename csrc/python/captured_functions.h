// Captures custom autograd.Functions op by op: the host of rules/captured_function.h. The rest is
// in python/torch_autobatch/_function_capture.py.
#pragma once

#include <Python.h>

namespace autobatch {

// `self` is a pending tensor, and the program registers the first hook for its gradient. Captures a
// node whose backward calls the hooks, and makes the tensor stand for the node's result. Returns
// false if the tensor has to exist before its hooks.
bool capture_hooks(PyObject* self);

void bind_captured_functions(PyObject* module);

}  // namespace autobatch

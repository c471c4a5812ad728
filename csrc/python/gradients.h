// Python bindings for the capture of autograd.grad in an open block.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds `derive` and related functions to the module. The functions use CPython's C API instead of
// pybind11, because instances of ab.map call them (see bind_fibers in fibers.h).
void bind_gradients(PyObject* module);

// install_gradients() installs the replacements that were passed to `replace`. remove_gradients()
// restores PyTorch's functions. Both functions need the GIL, and raise Python's exceptions as
// python_error.
void install_gradients();
void remove_gradients();

}  // namespace autobatch

// autograd.grad in an open block, for Python.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds `derive` to the module. A plain function of CPython's interface: an instance of ab.map may
// call it (fibers.h).
void bind_gradients(PyObject* module);

// Puts what `replace` was given in place, and PyTorch's own again. Both need the interpreter's
// lock, and raise Python's exceptions as python_error.
void install_gradients();
void remove_gradients();

}  // namespace autobatch

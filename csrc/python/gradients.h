// autograd.grad in an open block, for Python.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds `derive` to the module. A plain function of CPython's interface: an instance of ab.map may
// call it (fibers.h).
void bind_gradients(PyObject* module);

}  // namespace autobatch

// What Python's compiler (torch_autobatch/_compiled.py) sees of a cell's body, and how its code is
// called.
#pragma once

#include <Python.h>

namespace autobatch {

void bind_compiled_bodies(PyObject* module);

}  // namespace autobatch

// The type behind torch_autobatch.cell: a function whose calls in a block are captured as a whole
// (autobatch/cell.h). Calls back into Python: no pybind11 frame is on the stack then, since a fiber
// may be switched there.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds the type `Cell` to the module. Raises Python's exceptions as py::error_already_set.
void add_cell_type(PyObject* module);
// What cells written in Python need (_cell_dynamic.py).
void add_cell_functions(PyObject* module);

}  // namespace autobatch

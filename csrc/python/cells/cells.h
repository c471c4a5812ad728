// The type of the objects that torch_autobatch.cell returns: functions whose calls in a block are
// captured as a whole (autobatch/cells/cell_template.h). When a cell calls its Python function, no
// pybind11 function may be on the stack, because a fiber may be suspended in the Python function
// (fibers.h).
#pragma once

#include <Python.h>

namespace autobatch {

// Adds the type `Cell` to the module. Raises Python's exceptions as py::error_already_set.
void add_cell_type(PyObject* module);
// Adds the functions and types that _cell_dynamic.py uses to the module.
void add_cell_functions(PyObject* module);

}  // namespace autobatch

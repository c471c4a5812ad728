// Gives the compiler in Python (torch_autobatch/_compiled.py) access to the subgraphs of cells, and
// calls the compiled code.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds the types that describe subgraphs to the module, and registers the compiler with the core.
void bind_compiled_subgraphs(PyObject* module);

}  // namespace autobatch

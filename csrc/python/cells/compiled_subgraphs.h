// What Python's compiler (torch_autobatch/_compiled.py) sees of a cell's subgraph, and how its code
// is called.
#pragma once

#include <Python.h>

namespace autobatch {

void bind_compiled_subgraphs(PyObject* module);

}  // namespace autobatch

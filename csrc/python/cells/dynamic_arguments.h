// Flattens the arguments of a dynamic cell's call (torch_autobatch/_cell_arguments.py).
#pragma once

#include <Python.h>

namespace autobatch {

// `take_apart(args, kwargs)` returns a tuple of
//   the key (bytes), which identifies the call's kind;
//   the inputs of the cell's program (tuple): tensors, ints, and containers of these;
//   the objects whose addresses are in the key (list), which must live as long as the key;
//   the index of each container among the inputs (dict, by id);
//   the ints in containers (list of tuples): container, name, index of the input;
//   the number of inputs that each outermost container adds (dict, by id). The container itself
//     counts as one input.
// The function returns None if an argument can be identified neither by value nor by address.
PyObject* take_apart(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace autobatch

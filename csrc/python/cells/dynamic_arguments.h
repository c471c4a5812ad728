// The arguments of a dynamic cell's call (torch_autobatch/_cell_arguments.py), taken apart.
#pragma once

#include <Python.h>

namespace autobatch {

// `take_apart(args, kwargs)`: a tuple of
//   a key (bytes): what tells the call's kind;
//   the inputs of its program (tuple): tensors, ints, and containers of these;
//   objects (list) that are to live as long as the key, which has their addresses;
//   the numbers of the containers among the inputs (dict, by id);
//   ints in containers (list): container, name, number of the input;
//   how many inputs are in a container (dict, by id).
// None if an argument can't be told from others.
PyObject* take_apart(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace autobatch

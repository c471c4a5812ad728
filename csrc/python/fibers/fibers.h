// ab.map's fibers, as greenlets.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds `run_fibers` and `wait_in_fiber` to the module. They are plain functions of CPython's
// interface: a pybind11 function keeps a list of its calls for each thread, and ends the process if
// one returns before a later one has.
void bind_fibers(PyObject* module);

// Adds the type `Server` (server.cpp), on which `wait_in_fiber` waits for `wake`.
void add_server_type(PyObject* module);

// Whether the code that runs is an instance's, and not in a greenlet of its own.
bool is_in_fiber();

}  // namespace autobatch

// ab.map's fibers, as greenlets.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds `run_fibers`, `wait_in_fiber` and related functions to the module. They use CPython's C API
// instead of pybind11. pybind11 keeps a list of the active calls of each thread, and ends the
// process if a call returns before a later one.
void bind_fibers(PyObject* module);

// Adds the type `Server` (server.cpp). In its fibers, `wait_in_fiber` waits for `Server.wake`.
void add_server_type(PyObject* module);

// Whether the running code is that of an instance. False in a greenlet that an instance's code has
// created.
bool is_in_fiber();

}  // namespace autobatch

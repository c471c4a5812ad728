// The fibers of ab.map, which are greenlets.
#pragma once

#include <Python.h>

namespace autobatch {

// Adds `run_fibers`, `wait_in_fiber` and related functions to the module. The functions use
// CPython's C API instead of pybind11. pybind11 has a list of the active calls of each thread, and
// terminates the process if a call returns before another call that started later.
void bind_fibers(PyObject* module);

// Adds the type `Server` (server.cpp). In a fiber of a Server, `wait_in_fiber` waits until
// `Server.wake` is called.
void add_server_type(PyObject* module);

// Whether the running code belongs to an instance. Returns false in a greenlet that the code of an
// instance has created.
bool is_in_fiber();

}  // namespace autobatch

// Which line of the user's Python code is running.
#pragma once

#include <Python.h>

#include <string>

namespace autobatch {

// "model.py:12": the innermost frame outside torch and this package; empty if there is none.
// Takes the GIL if the thread does not hold it.
std::string python_call_site();

// Whether code is torch's, this package's or Python's own. Under the interpreter's lock.
bool is_library_code(PyCodeObject* code);

}  // namespace autobatch

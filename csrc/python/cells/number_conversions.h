// Calls of `int` and `float` in the trace of a dynamic cell. `int(x)` must return an instance of
// `int`, so `__int__` can't return a traced number (_cell_sizes.py). While a trace runs, the slots
// by which `int` and `float` construct numbers are replaced. If a call has one argument, the
// replacement first calls the trace's `convert`.
#pragma once

#include "autobatch/common/switches.h"

#include <Python.h>

namespace autobatch {

extern Switch number_conversions_switch;

// Sets the function `convert(type, value)` of the thread's trace. Null means that no trace runs.
// `convert` returns NotImplemented if the type itself should convert the value. Needs the GIL.
void trace_conversions(PyObject* convert);

}  // namespace autobatch

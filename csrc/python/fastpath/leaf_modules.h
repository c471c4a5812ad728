// A fast path for calls of PyTorch's leaf modules. When an nn.Linear is called, Python code runs
// for three microseconds before the op is called. The Python code is needed only for modules with
// hooks, parametrisations and similar features. While a block is open, this library replaces the
// tp_call slot of the leaf classes with a function that reads the parameters and calls the op. All
// other calls, including calls of other threads, are passed to nn.Module.__call__.
#pragma once

#include "autobatch/common/switches.h"

namespace autobatch {

// Both functions need the GIL, and raise Python's exceptions as py::error_already_set. A class is
// not changed if it has another `__call__` than nn.Module. If the user has replaced `forward`, or
// the function that `forward` calls, calls are passed to nn.Module.__call__.
extern Switch leaf_modules_switch;

void install_leaf_modules();
void remove_leaf_modules();

}  // namespace autobatch

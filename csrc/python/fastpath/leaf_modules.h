// A fast path for calls of PyTorch's leaf modules. Calling an nn.Linear takes three microseconds of
// Python code before its op is reached, and this code does nothing unless the module has hooks,
// parametrisations or the like. While a block is open, these classes have a tp_call slot of this
// library, which reads the parameters and calls the op. All other calls, including calls of other
// threads, are passed to nn.Module.__call__.
#pragma once

#include "autobatch/common/switches.h"

namespace autobatch {

// Both functions need the GIL, and raise Python's exceptions as py::error_already_set. A class
// whose `__call__` is not nn.Module's is left unchanged. If its `forward`, or the function that
// `forward` calls, is not PyTorch's, its calls take the ordinary path.
extern Switch leaf_modules_switch;

void install_leaf_modules();
void remove_leaf_modules();

}  // namespace autobatch

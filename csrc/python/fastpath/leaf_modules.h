// A fast way through PyTorch's own leaf modules. Calling an nn.Linear takes three microseconds of
// Python before its op is reached, and nothing in it depends on the call unless there are hooks,
// parametrisations or the like. While a block is open these classes have a tp_call slot of our
// own, which reads the parameters and calls the op; whatever is out of the ordinary, another
// thread's calls included, goes on to nn.Module.__call__.
#pragma once

namespace autobatch {

// Both need the interpreter's lock, and raise Python's exceptions as py::error_already_set. A class
// whose `__call__`, `forward` or function is not PyTorch's own is left as it is.
void install_leaf_modules();
void remove_leaf_modules();

}  // namespace autobatch

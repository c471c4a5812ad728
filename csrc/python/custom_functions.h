// Captures calls of custom autograd.Functions as nodes. While a block is open, the C function of
// PyTorch behind `Function.apply` is replaced. A call of a class with a vmap rule becomes a call of
// the op autobatch::custom_function. The op's kernel calls the class in Python: once for a whole
// batch under functorch's vmap, or once for each member. The requirements on classes and arguments
// are in python/torch_autobatch/_function.py.
#pragma once

namespace autobatch {

// Both functions need the GIL; patches.h says when they are called.
void install_custom_functions();
void remove_custom_functions();

}  // namespace autobatch

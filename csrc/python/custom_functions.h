// Captures calls of custom autograd.Functions as nodes. While a block is open, the C function that
// implements `Function.apply` is replaced. If a class has a vmap rule, a call of the class becomes
// a call of the op autobatch::custom_function. The op's kernel calls the class in Python, either
// once for the whole batch under functorch's vmap, or once for each member. The requirements on
// classes and arguments are in python/torch_autobatch/_function.py. For all other calls, the ops of
// forward are captured (captured_functions.h).
#pragma once

namespace autobatch {

// Both functions need the GIL. patches.h describes when they are called.
void install_custom_functions();
void remove_custom_functions();

}  // namespace autobatch

// Custom autograd.Functions: their calls as nodes. `Function.apply` ends in a C function of
// PyTorch's, which has one of ours in its place while a block is open. A call of a class with a
// vmap rule becomes a call of the op autobatch::custom_function, whose kernel calls the class in
// Python: once for all members of a batch under functorch's vmap, or for each. What is asked of
// classes and arguments is in python/torch_autobatch/_function.py.
#pragma once

namespace autobatch {

void install_custom_functions();
void remove_custom_functions();

}  // namespace autobatch

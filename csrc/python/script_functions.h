// Calls of TorchScript functions and methods on pending tensors. TorchScript optimizes a function
// after its first calls. Then parts of the function's graph are separate autograd nodes, which need
// computed tensors at each call. While a block is open, the graph runs without these nodes, so that
// the ops of the graph are captured one by one.
#pragma once

namespace autobatch {

// Both functions need the GIL. patches.h describes when they are called.
void install_script_functions();
void remove_script_functions();

}  // namespace autobatch

// How Python's tensor objects go while a block is open. PyTorch lets the interpreter's lock go for
// each, since memory may take long to free; a pending tensor has none, and a block drops one for
// most ops: a seventh of what capturing an op takes.
#pragma once

namespace autobatch {

// Both need the interpreter's lock; patches.h has when.
void install_tensor_objects();
void remove_tensor_objects();

}  // namespace autobatch

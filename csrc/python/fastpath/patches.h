// What is different in Python while a block is open on any thread. Everything is done by exchanging
// C slots: setting an attribute of a class would clear the interpreter's caches for it and all its
// subclasses, for each block.
#pragma once

namespace autobatch {

// Both need the interpreter's lock. The first open block puts in place, and the last one takes
// away:
//   - the short ways to capture and through nn.Module (direct_calls.h, leaf_modules.h,
//     module_attributes.h);
//   - tensors made from Python numbers (number_tensors.h);
//   - how objects of pending tensors go (tensor_objects.h);
//   - a `Tensor.is_leaf` and a `Tensor.grad_fn` that need no value to say that there is a history,
//     or none;
//   - in-place methods on tensors that are not pending (in_place_calls.h);
//   - reads of running statistics that are still to be written;
//   - the truth of a tensor, for checks that wait (checks.h);
//   - a `Tensor.new_tensor` and a `Tensor.new` for pending tensors, whose device PyTorch's own
//     can't tell.
void block_opens();
void block_closes();

// False where the environment has AUTOBATCH_FAST_PATHS=0. The first three items of the list above
// are left out then: every op is captured by its dispatch key. Results are the same, and capture
// costs more. It serves tests, and the search for a fault.
bool fast_paths_enabled();

}  // namespace autobatch

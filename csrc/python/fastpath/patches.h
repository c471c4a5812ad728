// Changes to PyTorch's Python classes and functions while a block is open on any thread. A class is
// changed by exchanging its C slots. If attributes of the class were set instead, each block would
// clear the interpreter's caches for the class and all its subclasses.
#pragma once

namespace autobatch {

// block_opens() and block_closes() need the GIL. The first block that opens installs these changes,
// and the last block that closes removes them:
//   - the fast path to capture (direct_calls.h);
//   - the fast paths through nn.Module (leaf_modules.h, module_attributes.h);
//   - capture of tensors that are created from Python numbers (number_tensors.h);
//   - creation and destruction of the objects of pending tensors (tensor_objects.h). This change
//     and the changes above have switches (autobatch/common/switches.h);
//   - the allocator of frame stacks (frame_memory.h), which has a switch too;
//   - `Tensor.is_leaf` and `Tensor.grad_fn`: they find whether a pending tensor has an autograd
//     history, and do not compute its value;
//   - in-place methods on tensors that are not pending (in_place_calls.h);
//   - reads and exports of a tensor's memory without an op (`numpy`, `data_ptr`, `untyped_storage`,
//     DLPack), because the memory may have pending updates (memory_updates.h);
//   - truth values of tensors, for deferred checks (deferred_checks.h);
//   - `Tensor.new_tensor` and `Tensor.new`, because PyTorch's own methods can't find the device of
//     a pending tensor;
//   - `torch.autograd.graph.increment_version`;
//   - calls of custom autograd.Functions (custom_functions.h);
//   - calls of TorchScript functions and methods (script_functions.h);
//   - functions and classes that were passed to `replace` (gradients.h).
void block_opens();
void block_closes();

bool any_block_open();

}  // namespace autobatch

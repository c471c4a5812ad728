// Changes to PyTorch's Python classes and functions while a block is open on any thread. Classes
// are changed by exchanging C slots: setting an attribute of a class would clear the interpreter's
// caches of the class and all its subclasses, at each block.
#pragma once

namespace autobatch {

// Both functions need the GIL. The first block that opens installs these changes, and the last
// block that closes removes them:
//   - the fast paths to capture and through nn.Module (direct_calls.h, leaf_modules.h,
//     module_attributes.h), capture of tensors that are created from Python numbers
//     (number_tensors.h), and creation and destruction of the objects of pending tensors
//     (tensor_objects.h). Each of these five has a switch (autobatch/common/switches.h);
//   - `Tensor.is_leaf` and `Tensor.grad_fn`, which need no value to tell whether a pending tensor
//     has an autograd history;
//   - in-place methods on tensors that are not pending (in_place_calls.h);
//   - reads and exports of a tensor's memory without an op (`numpy`, `data_ptr`, `untyped_storage`,
//     DLPack): the memory may be that of running statistics with pending updates;
//   - truth values of tensors, for deferred checks (deferred_checks.h);
//   - `Tensor.new_tensor` and `Tensor.new`, because PyTorch's own methods can't find the device of
//     a pending tensor;
//   - `torch.autograd.graph.increment_version`;
//   - calls of custom autograd.Functions (custom_functions.h);
//   - functions and classes that were given to `replace` (gradients.h).
void block_opens();
void block_closes();

bool any_block_open();

}  // namespace autobatch

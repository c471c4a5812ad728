// Reads of autograd metadata that dispatch no op.
#pragma once

namespace autobatch {

// Wraps PyTorch's VariableHooks, once a process: asking a pending tensor for its grad_fn, its
// hooks or its data (which backward, register_hook, retain_grad, Function.apply and `.data` all
// do) computes it first. Installed when the first scope opens, so importing changes nothing.
void install_variable_hooks();

}  // namespace autobatch

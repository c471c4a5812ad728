// Reads of autograd metadata that dispatch no op.
#pragma once

namespace autobatch {

// Wraps PyTorch's VariableHooks, once a process: asking a pending tensor for its grad_fn or its
// hooks (which backward, register_hook, retain_grad and Function.apply do) computes it first.
// `.data` is captured, or noted as an alias (overwrites.h). Installed when the first scope opens,
// so importing changes nothing.
void install_variable_hooks();

}  // namespace autobatch

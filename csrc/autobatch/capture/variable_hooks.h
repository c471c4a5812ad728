// Handles reads of autograd metadata, which dispatch no op.
#pragma once

namespace autobatch {

// Wraps PyTorch's VariableHooks, once per process. Access to a pending tensor's grad_fn or hooks
// (by backward, register_hook, retain_grad and Function.apply) computes the tensor first. A read of
// `.data` is captured, or recorded as an alias (overwrites.h). The hooks are installed when the
// first scope opens, so importing the library changes nothing.
void install_variable_hooks();

}  // namespace autobatch

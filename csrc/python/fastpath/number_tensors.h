// `torch.tensor(1.0)` and `torch.as_tensor(1.0)`. Libraries make tensors from Python numbers so
// that one code path serves numbers and tensors (torch.distributions does so with each parameter).
// While a block is open the result is pending, so that ops on it are captured too. Its value is
// known (known_values.h): a read of it flushes nothing. Tensors made from lists and arrays are made
// at once, as without a block.
#pragma once

namespace autobatch {

// Both need the interpreter's lock; patches.h has when.
void install_number_tensors();
void remove_number_tensors();

}  // namespace autobatch

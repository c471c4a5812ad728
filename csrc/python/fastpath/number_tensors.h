// `torch.tensor(1.0)` and `torch.as_tensor(1.0)`: what libraries make of numbers, to compute with
// them as with tensors (torch.distributions of each parameter). While a block is open the result
// is pending, so that what is computed from it is captured too. Its value is known
// (known_values.h): a read of it flushes nothing. Lists, arrays and tensors are data, made as ever.
#pragma once

namespace autobatch {

// Both need the interpreter's lock; patches.h has when.
void install_number_tensors();
void remove_number_tensors();

}  // namespace autobatch

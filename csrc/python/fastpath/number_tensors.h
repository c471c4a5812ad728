// Captures `torch.tensor(1.0)` and `torch.as_tensor(1.0)`. Libraries create tensors from Python
// numbers so that one code path serves numbers and tensors (torch.distributions does so with each
// parameter). While a block is open the result is pending, so that ops on it are captured too. Its
// value is known (known_values.h): reading it flushes nothing. Tensors from lists and arrays are
// created at once, as without a block.
#pragma once

#include "autobatch/common/switches.h"

namespace autobatch {

// Both functions need the GIL; patches.h says when they are called.
extern Switch number_tensors_switch;

void install_number_tensors();
void remove_number_tensors();

}  // namespace autobatch

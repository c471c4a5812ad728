// Captures `torch.tensor(1.0)` and `torch.as_tensor(1.0)`. Libraries convert Python numbers to
// tensors, so that the same code handles numbers and tensors (torch.distributions converts each
// parameter). While a block is open, the result of the conversion is pending, so that ops that read
// the result are captured too. The value of the result is known (known_values.h), so a read of the
// value starts no flush. Tensors from lists and arrays are created immediately, as without a block.
#pragma once

#include "autobatch/common/switches.h"

namespace autobatch {

// Both functions need the GIL. patches.h describes when they are called.
extern Switch number_tensors_switch;

void install_number_tensors();
void remove_number_tensors();

}  // namespace autobatch

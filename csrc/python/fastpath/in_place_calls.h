// In-place methods, `y[i] = h` and `y += h` where `h` is pending and `y` is not: where nobody can
// tell, `y` becomes pending first (autobatch/adopt.h), so that nothing has to be computed.
#pragma once

namespace autobatch {

// Both need the interpreter's lock; patches.h has when.
void install_in_place_calls();
void remove_in_place_calls();

}  // namespace autobatch

// In-place methods, `y[i] = h` and `y += h`, where `h` is pending and `y` is not. If no other
// reference could observe the difference, `y` becomes pending first (autobatch/capture/adopt.h), so
// that `h` need not be computed.
#pragma once

namespace autobatch {

// Both functions need the GIL; patches.h says when they are called.
void install_in_place_calls();
void remove_in_place_calls();

}  // namespace autobatch

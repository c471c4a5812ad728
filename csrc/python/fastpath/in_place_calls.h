// Handles in-place methods such as `y[i] = h` and `y += h` if `h` is pending and `y` is not. If no
// other reference to the memory of `y` can observe the difference, `y` first becomes pending
// (autobatch/capture/adopt.h). Then the write can be captured, and `h` is not computed at this
// point.
#pragma once

namespace autobatch {

// Both functions need the GIL. patches.h describes when they are called.
void install_in_place_calls();
void remove_in_place_calls();

}  // namespace autobatch

// Keeps freed memory of Python's frame stacks for later fibers. Each greenlet has a separate frame
// stack. CPython maps a chunk of memory for the frame stack at the first call of a Python function,
// and unmaps the chunk when the greenlet ends. In each instance of a map, the two system calls and
// the page faults take more time than capturing ten ops.
#pragma once

#include "autobatch/common/switches.h"

#include <cstddef>

namespace autobatch {

extern Switch frame_memory_switch;

// Both functions need the GIL. patches.h describes when they are called.
void install_frame_memory();
void remove_frame_memory();

// Frees the kept memory. Returns the number of freed bytes.
size_t free_frame_memory();

}  // namespace autobatch

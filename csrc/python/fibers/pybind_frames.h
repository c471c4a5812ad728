// Detects calls of pybind11 functions on the C stack. No fiber may be suspended in such a call.
#pragma once

namespace autobatch {

// Whether this thread's stack has a call of a pybind11 function between the two addresses. Such
// functions are, for example, torch.ops.*, scripted functions and users' extensions. pybind11 keeps
// a list of the active calls of each thread, and ends the process if a call returns before a later
// one. Each library has such a list of its own, which other libraries can't access, so this
// function searches the stack.
bool is_in_pybind11(const void* low, const void* high);
// Call this function before the first call of is_in_pybind11. Needs the GIL.
void prepare_is_in_pybind11();

}  // namespace autobatch

// Calls of pybind11 functions on the C stack, which no fiber may be suspended in.
#pragma once

namespace autobatch {

// Whether a call of a pybind11 function (torch.ops.*, a scripted function, somebody's extension)
// stands on this thread's stack between the two addresses. pybind11 keeps a list of the calls of a
// thread, and ends the process if one returns before a later one has; each library has a list of
// its own, out of our reach.
bool is_in_pybind11(const void* low, const void* high);
// Needs the interpreter's lock, which is_in_pybind11 does not; before the first call of that.
void prepare_is_in_pybind11();

}  // namespace autobatch

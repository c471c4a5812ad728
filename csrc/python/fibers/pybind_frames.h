// Detects calls of pybind11 functions on the C stack. No fiber may be suspended in such a call.
#pragma once

namespace autobatch {

// Whether this thread's stack has a call of a pybind11 function between the two addresses. Examples
// of pybind11 functions are torch.ops.*, scripted functions and users' extensions. pybind11 has a
// list of the active calls of each thread, and ends the process if a call returns before a call
// that started later. Each library has a separate list, which other libraries can't access. So
// is_in_pybind11() searches the stack instead.
bool is_in_pybind11(const void* low, const void* high);
// Call this function before the first call of is_in_pybind11. Needs the GIL.
void prepare_is_in_pybind11();

}  // namespace autobatch

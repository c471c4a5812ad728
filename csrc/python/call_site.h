// Which line of the user's Python code is running.
#pragma once

#include "autobatch/scope/payoff.h"

#include <Python.h>

#include <memory>
#include <string>

namespace autobatch {

// "model.py:12": the innermost frame outside torch and this package; empty if there is none.
// Takes the GIL if the thread does not hold it.
std::string python_call_site();

// Where that is in an installed package: the user's own line that led there; else empty. Likewise.
std::string python_caller();

// What blocks were like that were opened at that place; null if there is none. Under the
// interpreter's lock.
std::shared_ptr<BlockHistory> python_block_history();

// Whether code is torch's, this package's or Python's own. Under the interpreter's lock.
bool is_library_code(PyCodeObject* code);

}  // namespace autobatch

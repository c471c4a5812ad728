// Checks of values in Python code that wait for a flush (autobatch/checks.h). Where code asks for
// the truth of a pending tensor, by `__bool__` or `item`, and one answer leads to nothing but an
// error, it gets the other one at once. Which places those are, _checks.py finds out from the
// source, once for each; what may catch the error, likewise for each function that is being called.
#pragma once

#include "autobatch/scope/scope.h"

namespace autobatch {

// All need the interpreter's lock.
void install_checks();
void remove_checks();

// Of a scope that is opened: which checks wait. Called by what the frame that opens the block
// calls.
void begin_checks(Scope& scope, Checks::Which which);

}  // namespace autobatch

// Deferred checks of Python code (autobatch/plan/deferred_checks.h). Code may read the truth value
// of a pending tensor, by `__bool__` or `item`, where one of the two truth values leads only to an
// error. The read then returns the other truth value at once, and the flush that computes the
// tensor verifies this value. _deferred_checks.py finds such places in the source code, and
// _catching.py finds whether a function on the call stack may catch the error. The answers are
// cached for each place.
#pragma once

#include "autobatch/scope/scope.h"

namespace autobatch {

// All functions need the GIL.
void install_checks();
void remove_checks();

// Sets which checks of a newly opened scope are deferred. The caller of the running Python function
// is taken as the frame that opens the block: call this from `__enter__`.
void begin_checks(Scope& scope, DeferredChecks::Which which);

}  // namespace autobatch

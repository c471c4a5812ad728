// Deferred checks of Python code (autobatch/plan/deferred_checks.h). If code reads the truth value
// of a pending tensor, by `__bool__` or `item`, and one of the two truth values leads only to an
// error, the read returns the other one at once; the flush that computes the tensor verifies it.
// _deferred_checks.py finds such places in the source code, and _catching.py finds whether a
// function on the call stack may catch the error. The answers are cached for each place.
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

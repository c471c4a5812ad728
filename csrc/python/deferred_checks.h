// Deferred checks of Python code (autobatch/plan/deferred_checks.h). Code may read the truth value
// of a pending tensor (by `__bool__` or `item`) at a place where one of the two truth values always
// leads to an error. In this case the read returns the other truth value immediately. The flush
// that computes the tensor verifies this value. _deferred_checks.py finds such places in the source
// code. _catching.py finds whether a function on the call stack may catch the error. The results of
// both modules are cached for each place.
#pragma once

#include "autobatch/scope/scope.h"

namespace autobatch {

// All functions except may_catch need the GIL.
void install_checks();
void remove_checks();

// Sets which checks of a newly opened scope are deferred. Call this function from `__enter__`,
// because the caller of the running Python function must be the frame that opens the block.
void begin_checks(Scope& scope, DeferredChecks::Which which);

// Whether code of the open block may catch an error that is raised now. Takes the GIL.
bool may_catch();

}  // namespace autobatch

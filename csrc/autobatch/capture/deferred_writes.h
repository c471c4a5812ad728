// In-place ops, deferred. A captured write adds the node of the op's functional counterpart and
// notes where its result now stands (graph.h: Memory); whoever looks at that memory afterwards,
// through whichever view, reads the result. Nothing is overwritten, so what was read before stays
// right, in forward and in backward.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;

// Captures an op that writes to its argument 0. False, with nothing changed, if it has to run
// after a flush: on a tensor that is not pending, on a graph input's memory, where a detached
// view would share the memory but not the history, where eager would raise an error.
bool record_write(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// assemble(self, places, pieces): `self` with each piece where its place, a view of self, lies.
const OpInfo& assemble_op();

// Before pending arguments are read: puts the pieces that were written to the memory they look at
// together, where one alone does not serve.
void settle(Scope& scope, at::ArrayRef<c10::IValue> arguments);

// Before a flush: makes every pending tensor stand for what its memory holds now.
void settle_all(Scope& scope);

}  // namespace autobatch

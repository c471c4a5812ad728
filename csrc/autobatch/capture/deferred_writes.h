// Captures in-place ops. A captured write adds a node of the op's functional counterpart. It also
// records the region of memory that holds the result from now on (graph.h: Memory). Every later
// read of this region, through any view, reads the result. No value is overwritten, so earlier
// reads stay correct, in forward and in backward.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;

// Captures an op that writes to its argument 0. Returns false, with no write captured, if the op
// has to run after a flush. This is the case if argument 0 is not pending, is in the memory of a
// graph input, or has a detached view. (A detached view would share the memory but not the
// history.) It is also the case if eager would raise an error.
bool record_write(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// Returns the op assemble(self, places, pieces). The result of the op is `self` with each piece
// written to its place. A place is a view of `self`.
const OpInfo& assemble_op();
// Returns the op with_values(self, values). The result of the op has the history of `self`.
const OpInfo& with_values_op();

// Runs all pending ops if the op writes to a pending tensor whose memory is shared by a pending
// tensor of another dtype (shared_memory.h). Returns true in this case.
bool flush_shared_memory(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// Prepares pending arguments for a read. If the memory of an argument was written to in pieces, and
// no single piece covers the argument, the pieces are combined into one value.
void settle(Scope& scope, at::ArrayRef<c10::IValue> arguments);

// Prepares a flush: makes every pending tensor stand for the current value of its memory.
void settle_all(Scope& scope);

}  // namespace autobatch

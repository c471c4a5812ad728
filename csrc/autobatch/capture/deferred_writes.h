// Captures in-place ops. A captured write adds a node of the op's functional counterpart, and notes
// the region of memory that now holds the result (graph.h: Memory). Every later read of this
// region, through any view, reads the result. No value is overwritten, so earlier reads stay
// correct, in forward and in backward.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;

// Captures an op that writes to its argument 0. Returns false, with no write captured, if the op
// has to run after a flush. An op has to run after a flush if argument 0 is not pending or is in
// the memory of a graph input. A flush is also needed if eager would raise an error, or if argument
// 0 has a detached view. (A detached view would share the memory but not the history.)
bool record_write(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// Returns the op assemble(self, places, pieces). The result of the op is `self` with each piece
// written to its place. A place is a view of `self`.
const OpInfo& assemble_op();
// Returns the op with_values(self, values). The result of the op has the history of `self`.
const OpInfo& with_values_op();

// If the op writes to a pending tensor whose memory a pending tensor of another dtype shares
// (shared_memory.h), runs all pending ops. Returns whether it did.
bool flush_shared_memory(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// Prepares pending arguments for a read. If the memory of an argument was written to in pieces, and
// no single piece covers the argument, the pieces are combined into one value.
void settle(Scope& scope, at::ArrayRef<c10::IValue> arguments);

// Prepares a flush: makes every pending tensor stand for the current value of its memory.
void settle_all(Scope& scope);

}  // namespace autobatch

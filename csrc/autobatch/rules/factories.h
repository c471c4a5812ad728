// Functions that capture uses for factory ops and for the ops that represent deferred writes.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/graph/signature.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

// Defines `autobatch::assemble`, `autobatch::with_values` and similar ops, once per process.
void register_memory_ops();

// Whether the op is a factory, such as zeros or full.
bool is_factory(const Signature& signature);
// Whether the value is the result of `autobatch::leaf`. This op represents a tensor that
// requires_grad_() has made a leaf. Its result requires grad and has no history.
bool is_leaf(const Tape& tape, ValueId id);
// Runs a captured factory immediately, outside any batch.
at::Tensor create_alone(const Signature& signature, const Value& value);

}  // namespace autobatch

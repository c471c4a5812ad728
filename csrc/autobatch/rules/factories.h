// Factories, and the op behind deferred writes: what the capture stage needs to know of them.
#pragma once

#include "autobatch/graph/signature.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

// Defines `autobatch::assemble`, once a process.
void register_memory_ops();

// Whether what has this signature is a factory: zeros, full.
bool is_factory(const Signature& signature);
// What a captured factory makes, at once and by itself.
at::Tensor create_alone(const Signature& signature, const Value& value);

}  // namespace autobatch

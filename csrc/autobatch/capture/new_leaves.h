// Pending tensors that requires_grad_() makes leaves (`z = (z - g).detach().requires_grad_()`, in
// loops that follow a gradient).
//
// The tensor's value has no history and requires no grad. If an op of the block uses the tensor in
// grad mode, the tensor gets a new value, the result of `autobatch::leaf`, which requires grad. If
// the tensor still exists when it becomes real, it is a leaf, and gradients of the block reach its
// `grad` (materialize.cpp). Otherwise nobody can read the gradient, and backward drops it.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;

// Gives each argument that requires_grad_() has made a leaf its new value. Returns false if an
// argument shares its memory with other tensors, was written to in place, or has hooks. Such a call
// must flush.
bool capture_new_leaves(Scope& scope, at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch

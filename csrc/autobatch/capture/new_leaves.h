// Captures uses of pending tensors that requires_grad_() has turned into leaves (`z = (z -
// g).detach().requires_grad_()`, in loops of gradient steps).
//
// The tensor's value has no history and requires no grad. If an op of the block uses the tensor in
// grad mode, the tensor gets a new value that requires grad. This value is the result of the op
// `autobatch::leaf`. If the tensor still exists when it becomes real, it is a leaf, and gradients
// of the block are added to its `grad` (materialize.cpp). Otherwise nobody can read the gradient,
// and backward drops it.
#pragma once

#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;

// Gives a new value to each argument that requires_grad_() has turned into a leaf. Returns false if
// an argument shares its memory with other tensors, was written to in place, or has hooks. Such a
// call must flush.
bool capture_new_leaves(Scope& scope, at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch

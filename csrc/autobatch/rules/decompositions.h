// Ops that have no native rule and are not composite, but can be computed by ops that have native
// rules. (For composite ops, whose kernels call other ops, see Action::kDecompose.) A native rule
// batches instances of any size. The generic rules need one batch for each size.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace autobatch {

// Used if no native rule covers a call of the op, in place of the generic rules.
struct Decomposition {
  // Whether `run` computes this call. Returns false for arguments that eager may reject, so that
  // eager raises its own error.
  bool (*covers)(at::ArrayRef<c10::IValue> arguments);
  // Computes the result by calls of ops, which are captured.
  at::Tensor (*run)(at::ArrayRef<c10::IValue> arguments);
};

inline bool has_decomposition(const OpInfo& op, at::ArrayRef<c10::IValue> arguments) {
  return op.decomposition != nullptr && op.decomposition->covers(arguments);
}

}  // namespace autobatch

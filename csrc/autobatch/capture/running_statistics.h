// Captures `batch_norm` in training on a pending tensor. The op is captured as if it kept no
// running statistics. The mean and the variance of the batch are captured too. After a flush has
// computed the mean and the variance, they are added to the running statistics, in the order of the
// calls. Before this update, the memory of the running statistics is stale, and any read or write
// of the memory has to wait.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <deque>
#include <string>

namespace autobatch {

class Scope;

struct StatisticsUpdate {
  at::Tensor target;
  at::Tensor source;
  double momentum = 0;
};

// Captures a call of `op` and sets `result`. Returns false, with nothing changed, if the call has
// to run eagerly.
bool record_batch_norm(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                       at::Tensor& result);

// Applies the updates whose statistics are computed, in order. If a statistic was lost, drops its
// update and all later ones.
void apply_updates(Scope& scope);

// Must be called before arguments are used. If the memory of an argument is stale, computes the
// statistics and applies the updates.
void finish_updates(Scope& scope, const std::string& op, at::ArrayRef<c10::IValue> arguments);
// Like finish_updates for arguments, but for a read that is not an op.
AUTOBATCH_INTERNAL void finish_updates(const at::Tensor& tensor, const char* read);

}  // namespace autobatch

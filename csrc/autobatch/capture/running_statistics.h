// `batch_norm` in training on a pending tensor. Its result is captured as that of one that keeps no
// statistics, and so are the mean and the variance that the running ones are to take in: the
// buffers are written to once these are computed, in the order of the calls. Until then the memory
// of the buffers is stale, and whoever reads or writes it has to wait.
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

// Captures a call of `op`, with its result. False, with nothing changed, if it has to run at once.
bool record_batch_norm(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                       at::Tensor& result);

// Makes those updates, in order, whose statistics are computed.
void apply_updates(Scope& scope);

// Before arguments are used: computes what is waited for if the memory of one is stale.
void finish_updates(Scope& scope, const std::string& op, at::ArrayRef<c10::IValue> arguments);
// The same for a read that is no op.
AUTOBATCH_INTERNAL void finish_updates(const at::Tensor& tensor, const char* read);

}  // namespace autobatch

// Updates of ordinary memory by values that are still pending (`buffer.mul_(0.9).add_(x.mean(0),
// alpha=0.1)`, running statistics). An update is kept until a flush has computed its sources. Then
// the updates are applied in the order of the calls. Until then the memory is stale: each other op
// that uses the memory, and each read of it, first finishes the updates.
//
// An in-place op on a tensor without other references needs no update, because the tensor itself
// becomes pending (adopt.h).
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <list>
#include <string>
#include <vector>

namespace autobatch {

class Scope;

struct MemoryUpdate {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // the target first
  const at::Tensor& target() const { return arguments[0].toTensor(); }
};

// An instance of a map that waits for `sources`, and then reads or writes the target's memory. The
// memory is stale for the other instances: they wait too, so that they use the memory in the order
// of the instances.
struct MemoryClaim {
  at::Tensor target;
  std::vector<at::Tensor> sources;
};

struct MemoryUpdates {
  std::list<MemoryUpdate> waiting;  // in the order of the calls
  std::list<MemoryClaim> claims;
};

// Whether the call can be kept as an update: a pointwise in-place op, `copy_`, `fill_` or `zero_`
// that autograd does not record. The other arguments are numbers, or pending tensors of the
// target's dtype. No pending op reads the target's memory, and no instance of a map waits for it.
bool is_update(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);
// Keeps the call as an update. Returns false if the call has to run eagerly.
bool record_update(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);
// Keeps a call of `op` for later. The first argument is the target.
void add_update(Scope& scope, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments);

// Applies the updates whose sources are computed, in order. If a source was lost, drops its update
// and all later ones.
void apply_updates(Scope& scope);

// Must be called before arguments are used. If the memory of an argument is stale, computes the
// sources and applies the updates. In a map, this waits for instances that are writing to the
// memory.
void finish_updates(Scope& scope, const std::string& op, at::ArrayRef<c10::IValue> arguments);
// Like finish_updates for arguments, but for a read that is not an op.
AUTOBATCH_INTERNAL void finish_updates(const at::Tensor& tensor, const char* read);

// Holds a claim on each target while this object exists. Does nothing outside of maps, and where
// the instance cannot be suspended.
class ClaimsHeld {
 public:
  ClaimsHeld(Scope& scope, at::ArrayRef<at::Tensor> targets,
             const std::vector<at::Tensor>& sources);
  ~ClaimsHeld();
  ClaimsHeld(const ClaimsHeld&) = delete;
  ClaimsHeld& operator=(const ClaimsHeld&) = delete;

 private:
  Scope& scope_;
  std::vector<std::list<MemoryClaim>::iterator> claims_;
};
// Claims the ordinary memory that the call writes to, until the pending arguments are computed.
ClaimsHeld claim_written(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch

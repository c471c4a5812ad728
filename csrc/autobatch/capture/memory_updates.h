// Updates of ordinary memory by values that are still pending (`buffer.mul_(0.9).add_(x.mean(0),
// alpha=0.1)`, running statistics). The pending values that an update uses are its sources. An
// update is kept until a flush has computed its sources. Then the updates are applied in the order
// of the calls. Until then the memory is stale. A further update of stale memory is also kept. Any
// other op that uses the memory, and any read of the memory, first finishes the updates.
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

class MemoryOrder;
class Scope;

struct MemoryUpdate {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // the first argument is the target
  c10::Storage storage;                // storage of the target
};

// An instance of a map that waits for a value before it reads or writes ordinary memory. The memory
// is stale for the other instances. A later instance that uses the memory waits for the end of this
// instance, as in a loop.
struct MemoryClaim {
  c10::Storage storage;
  uint64_t fiber;  // Fiber::number
};

struct MemoryUpdates {
  std::list<MemoryUpdate> waiting;  // the kept updates, in the order of the calls
  std::list<MemoryClaim> claims;
  std::vector<MemoryOrder*> orders;  // one for each running map
};

// Whether the call can be kept as an update. The op must be a pointwise in-place op, `copy_`,
// `fill_` or `zero_`, and autograd must not record the op. The other arguments must be numbers or
// pending tensors of the target's dtype. In addition, no pending op may read the target's memory,
// and no instance of a map may claim this memory.
bool is_update(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);
// Keeps the call as an update. Returns false if the call has to run eagerly.
bool record_update(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);
// Keeps a call of `op` for later. The first argument is the target.
void add_update(Scope& scope, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments);

// Applies the updates in order. Stops at the first update whose sources are not computed yet. If a
// source was lost, drops the update that uses the source, and all later updates.
void apply_updates(Scope& scope);

// Must be called before arguments are used. If the memory of an argument is stale, waits for the
// earlier instances of a map that have to use the memory first. Then computes the sources and
// applies the updates.
void finish_updates(Scope& scope, const std::string& op, at::ArrayRef<c10::IValue> arguments);
// Must be called before a call uses its arguments. Does the same as finish_updates, unless the call
// itself may become an update.
void prepare_memory(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);
// Does the same as finish_updates for a read that is not an op.
AUTOBATCH_INTERNAL void finish_updates(const at::Tensor& tensor, const char* read);

// Must be called before a write to pending memory. If an earlier instance of a map waits for the
// content of the memory, this function waits until that instance has ended, and returns true.
bool await_readers(Scope& scope, const at::Tensor& written);

// Claims the storages for the running instance of a map while this object exists. Does nothing if
// the instance cannot be suspended.
class ClaimsHeld {
 public:
  ClaimsHeld(Scope& scope, std::vector<c10::Storage> storages);
  ~ClaimsHeld();
  ClaimsHeld(const ClaimsHeld&) = delete;
  ClaimsHeld& operator=(const ClaimsHeld&) = delete;

 private:
  Scope& scope_;
  std::vector<std::list<MemoryClaim>::iterator> claims_;
};
// Claims the ordinary memory that the call writes to, if the call has to wait for an argument.
ClaimsHeld claim_written(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch

// Adding one call to the graph as a node.
#pragma once

#include "autobatch/capture/call_cache.h"
#include "autobatch/graph/dispatch_context.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/rule.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace autobatch {

class Scope;

// What a captured call gives back to its caller.
struct Recorded {
  c10::SmallVector<at::Tensor, 4> tensors;
  bool list = false;  // one Tensor[] rather than so many results
};

// Captures the call by the first of the op's rules that covers it, else by a generic one. False,
// with nothing captured, if none does. The memory that pending arguments look at must be settled
// (deferred_writes.h). `cached`, if given, is set to that of another call whose CallKey is the
// same.
bool record_call(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                 Recorded& recorded, std::optional<CachedCall>* cached = nullptr);

// The same by this rule alone. `left_to_eager`, if given, is set where the rule knows that eager
// must judge the arguments.
bool record_by(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
               const Rule& rule, const DispatchContext& context, Recorded& recorded,
               bool* left_to_eager = nullptr, std::optional<CachedCall>* cached = nullptr);

// Does what the cached call says, with the values of the call's tensors in place of its tensors;
// the visible results' numbers are appended. `records`: whether autograd is on. False, with nothing
// added, if eager has to make them.
bool apply_cached_call(Scope& scope, const OpInfo& op, const CachedCall& cached,
                       at::ArrayRef<ValueId> tensors, bool records,
                       c10::SmallVectorImpl<ValueId>& results);

// The same for a node, with the values of its operands. Bit i of `asks`: operand i may not have
// been asked yet where its gradient goes.
void apply_node(Scope& scope, const CachedCall& cached, at::ArrayRef<ValueId> operands,
                uint64_t asks, c10::SmallVectorImpl<ValueId>& results);

// Adds views of `self`, a pending tensor or one that autograd records: the results of the view op
// `op`. False, with nothing added, if eager has to make them.
bool record_views(Scope& scope, const OpInfo& op, const at::Tensor& self,
                  at::ArrayRef<CachedCall::View> views, bool list, Recorded& recorded);

// Captures a call that is known, and appends its results; null, with nothing captured, if it is
// not.
const CachedCall* record_known(Scope& scope, const OpInfo& op, CallKey& key,
                               c10::SmallVectorImpl<ValueId>& results);

// Whether autograd would record an op now.
bool records();

// `tensor.data`: shares its memory, and neither its history nor its version counter. Undefined if
// eager has to make it.
at::Tensor data_view(Graph& graph, const PendingTensor& tensor);

// The op, and the types and sizes of its tensors, for an error.
std::string describe_call(const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// Calls `visit` with each tensor of the argument, alone or in a list.
template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor());
    }
  }
}

}  // namespace autobatch

// Adds one call to the graph as a node or as views.
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

// The results of a captured call.
struct Recorded {
  c10::SmallVector<at::Tensor, 4> tensors;
  bool list = false;  // the results form one Tensor[]
};

// Captures the call by the first of the op's rules that covers the call. If no rule of the op
// covers the call, tries a generic rule. Returns false, with nothing captured, if no rule covers
// the call. The memory of pending arguments must be settled (deferred_writes.h). If `cached` is
// given, it is set to the CachedCall for later calls with an equal CallKey, or to nullopt if the
// call cannot be cached. If `may_decompose` is true, the caller will run a decomposition of the op,
// if there is one. So no generic rule is tried for an op with a decomposition.
bool record_call(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                 Recorded& recorded, std::optional<CachedCall>* cached = nullptr,
                 bool may_decompose = false);

// Like record_call, but uses only `rule`. If the capture fails and `left_to_eager` is given, it is
// set to true if eager must check the arguments and raise the error.
bool record_by(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
               const Rule& rule, const DispatchContext& context, Recorded& recorded,
               bool* left_to_eager = nullptr, std::optional<CachedCall>* cached = nullptr);

// Adds the node or the views of the cached call. `tensors` contains the values of the call's
// tensors, in the order of CallKey::tensors(). `grad_mode` tells whether autograd records ops.
// Appends the visible results to `results`. Returns false, with nothing added, if eager has to make
// the views.
bool apply_cached_call(Scope& scope, const OpInfo& op, const CachedCall& cached,
                       at::ArrayRef<ValueId> tensors, bool grad_mode,
                       c10::SmallVectorImpl<ValueId>& results);

// Adds the node of the cached call. The node reads the values `operands`. Bit i of `asks` is set if
// the gradient edge of operand i may still have to be requested (Graph::need_gradient).
void apply_node(Scope& scope, const CachedCall& cached, at::ArrayRef<ValueId> operands,
                uint64_t asks, c10::SmallVectorImpl<ValueId>& results);

// Adds the results of the view op `op` as views of `self`. Returns false, with nothing added, if
// eager has to make the views.
bool record_views(Scope& scope, const OpInfo& op, const at::Tensor& self,
                  at::ArrayRef<CachedCall::View> views, bool list, Recorded& recorded);

// Captures a call whose key is in the cache, and appends its results to `results`. Returns null,
// with nothing captured, if the key is not in the cache or eager has to make the views.
const CachedCall* record_known(Scope& scope, const OpInfo& op, CallKey& key,
                               c10::SmallVectorImpl<ValueId>& results);

// Whether autograd would record an op now.
bool grad_mode();

// Captures `tensor.data` as a view that shares the tensor's memory, but not its history and version
// counter. Returns an undefined tensor if eager has to make the view.
at::Tensor data_view(Graph& graph, const PendingTensor& tensor);

// Describes the op and the dtypes and sizes of its tensors, for an error message.
std::string describe_call(const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// Calls `visit` with each defined tensor of the argument, which may be a tensor or a list.
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

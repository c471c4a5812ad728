// The arguments of one call.
#pragma once

#include "autobatch/common/compat.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/scope/scope.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string_view>
#include <type_traits>

namespace autobatch {

// Properties of the arguments of one call, found in one pass.
struct Scan {
  bool pending = false;  // some tensor is pending
  bool requires_grad = false;
  bool weight = false;   // some tensor is in a weight position
  bool plain = true;     // every tensor is plain (is_plain), and captured ops may take it
  bool sparse = false;   // some tensor has another layout than kStrided
  bool foreign = false;  // some tensor is pending in another scope, or lost
  bool leaf = false;     // some pending tensor was made a leaf by requires_grad_()
};

Scan scan(const OpInfo& info, const Graph& graph, at::ArrayRef<c10::IValue> arguments);

// Returns why the arguments are not plain (Scan::plain), for the report.
const char* why_not_plain(at::ArrayRef<c10::IValue> arguments);

// Whether a call of this op is captured only if one of its tensor arguments is a reason for capture
// (may_be_captured).
inline bool is_captured_for_tensors(const OpInfo& info) {
  const bool deferred = info.action == Action::kDefer || info.action == Action::kView ||
                        info.action == Action::kDecompose;
  return deferred && info.weight_arguments == 0 && !info.always_defer && !info.is_cast &&
         info.index_argument < 0;
}

// Whether a tensor argument is a reason to capture a call: the tensor is pending, or autograd would
// record the call. If is_captured_for_tensors() is true for an op, a call runs at once if
// may_be_captured() is false for all tensor arguments. Most ops on a program's data (masks,
// distances, positions) run at once.
inline bool may_be_captured(const CaptureState& state, const at::Tensor& tensor) {
  return tensor.defined() &&
         (tensor.key_set().has(compat::kDeferKey) || (tensor.requires_grad() && state.grad_mode()));
}
inline bool may_be_captured(const CaptureState& state, at::ArrayRef<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (may_be_captured(state, tensor)) return true;
  }
  return false;
}
inline bool may_be_captured(const CaptureState& state, const c10::IValue& value) {
  if (value.isTensor()) return may_be_captured(state, value.toTensor());
  if (!value.isList()) return false;
  for (const c10::IValue& item : value.toListRef()) {
    if (item.isTensor() && may_be_captured(state, item.toTensor())) return true;
  }
  return false;
}
inline bool may_be_captured(const CaptureState& state, const at::ITensorListRef& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (may_be_captured(state, tensor)) return true;
  }
  return false;
}
inline bool may_be_captured(const CaptureState& state, const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && may_be_captured(state, *tensor);
}
// The argument types of the unboxed kernels that contain no tensor. A type that is not listed does
// not compile.
template <class T>
concept HoldsNoTensor =
    std::is_arithmetic_v<T> || std::is_same_v<T, std::string_view> ||
    std::is_same_v<T, at::Scalar> || std::is_same_v<T, c10::SymInt> ||
    std::is_same_v<T, c10::SymIntArrayRef> || std::is_same_v<T, at::OptionalIntArrayRef> ||
    std::is_same_v<T, std::optional<at::ScalarType>> ||
    std::is_same_v<T, std::optional<at::MemoryFormat>> || std::is_same_v<T, at::IntArrayRef> ||
    std::is_same_v<T, std::optional<c10::SymInt>>;
template <HoldsNoTensor T>
bool may_be_captured(const CaptureState&, const T&) {
  return false;
}

// Whether a call for which may_be_captured() is false may run at once. The call may run at once if
// ops on ordinary data are not captured (set_captures_data) and no cell or formula is being traced.
// In addition, no buffer may wait for a captured write (running_statistics.h).
inline bool may_pass(const CaptureState& state) {
  return !state.captures_data && state.trace == nullptr && state.formula == nullptr &&
         (state.scope == nullptr || !state.scope->graph().has_stale());
}

// Whether the call takes no tensor and returns the same result each time, like `arange(5)`.
bool makes_constant(const OpInfo& info, at::ArrayRef<c10::IValue> arguments);

// Calls `visit` with each dense tensor that the call writes to.
template <class Visit>
void for_each_written(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Visit& visit) {
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    if ((info.written_arguments >> i & 1) == 0) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.layout() == c10::kStrided && !tensor.is_meta()) visit(tensor);
    });
  }
}

// Computes the pending arguments. The reason in the report is the op's name, followed by
// `separator` and `reason`.
void make_real(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const char* separator,
               const char* reason);

}  // namespace autobatch

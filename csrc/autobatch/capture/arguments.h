// Functions that examine the arguments of a call before it is captured.
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

// The value of Scan::unusable for a leaf that new_leaves.h describes.
inline constexpr const char* kNewLeaf = "a tensor that requires_grad_() made a leaf";

// Properties of the arguments of one call, found in one pass.
struct Scan {
  bool pending = false;            // some tensor is pending
  bool is_recorded = false;        // CaptureReasons::is_recorded()
  bool weight = false;             // some tensor is passed as a weight
  bool plain = true;               // every tensor is plain (is_plain), and captured ops accept it
  bool sparse = false;             // some tensor has a layout other than kStrided
  const char* unusable = nullptr;  // kind of a pending tensor that cannot be an operand, or null
};

Scan scan(const OpInfo& info, const Graph& graph, at::ArrayRef<c10::IValue> arguments);

// Returns why the arguments are not plain (Scan::plain), for the report.
const char* why_not_plain(at::ArrayRef<c10::IValue> arguments);

// Whether a call of this op is captured only if CaptureReasons finds a reason in its tensors.
inline bool is_captured_for_tensors(const OpInfo& info) {
  const bool deferred = info.action == Action::kDefer || info.action == Action::kView ||
                        info.action == Action::kDecompose;
  return deferred && info.weight_arguments == 0 && !info.always_defer && !info.is_cast &&
         info.index_argument < 0;
}

// The argument types of the unboxed kernels that contain no tensor. A kernel with an argument of
// any other type does not compile.
template <class T>
concept HoldsNoTensor =
    std::is_arithmetic_v<T> || std::is_same_v<T, std::string_view> ||
    std::is_same_v<T, at::Scalar> || std::is_same_v<T, c10::SymInt> ||
    std::is_same_v<T, c10::SymIntArrayRef> || std::is_same_v<T, at::OptionalIntArrayRef> ||
    std::is_same_v<T, std::optional<at::ScalarType>> ||
    std::is_same_v<T, std::optional<at::MemoryFormat>> || std::is_same_v<T, at::IntArrayRef> ||
    std::is_same_v<T, std::optional<c10::SymInt>>;

// Decides whether the tensor arguments of a call are a reason to capture the call. There are three
// reasons: one of the tensors is pending, autograd would record the call, or the call computes a
// function of parameters. Most ops on a program's data (masks, distances, positions) are not
// captured. Without grad mode, a function of parameters is captured so that it is computed only
// once for all instances (plan/common_subexpressions.h). Other arguments of such a function, such
// as a mask of pruned weights, are not larger than the parameters. So the pending results need
// little memory.
class CaptureReasons {
 public:
  explicit CaptureReasons(const CaptureState& state) : grad_mode_(state.grad_mode()) {}

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.key_set().has(compat::kDeferKey)) {
      is_pending_ = true;
    } else if (grad_mode_) {
      is_recorded_ = is_recorded_ || tensor.requires_grad();
    } else {
      add_size(tensor);
    }
  }
  void add(at::ArrayRef<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) add(tensor);
  }
  void add(const at::ITensorListRef& tensors) {
    for (const at::Tensor& tensor : tensors) add(tensor);
  }
  void add(const std::optional<at::Tensor>& tensor) {
    if (tensor.has_value()) add(*tensor);
  }
  void add(const c10::IValue& value) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { add(tensor); });
  }
  template <HoldsNoTensor T>
  void add(const T&) {}

  bool is_recorded() const {
    return is_recorded_ || (largest_parameter_ > 0 && largest_other_ <= largest_parameter_);
  }
  bool any() const { return is_pending_ || is_recorded(); }

 private:
  void add_size(const at::Tensor& tensor);

  bool grad_mode_, is_pending_ = false, is_recorded_ = false;
  int64_t largest_parameter_ = 0, largest_other_ = 0;  // numbers of elements
};

inline bool has_capture_reasons(const CaptureState& state, at::ArrayRef<c10::IValue> arguments) {
  CaptureReasons reasons(state);
  for (const c10::IValue& value : arguments) reasons.add(value);
  return reasons.any();
}

// Whether a call without CaptureReasons may run eagerly. This requires that ops on ordinary data
// are not captured (set_captures_data), that no cell or formula is being traced, and that no buffer
// waits for a captured write (memory_updates.h).
inline bool may_pass(const CaptureState& state) {
  return !state.captures_data && state.trace == nullptr && state.formula == nullptr &&
         (state.scope == nullptr || !state.scope->graph().has_stale());
}

// Whether the call returns the same result each time. It either takes no tensor, like `arange(5)`,
// or makes a view of a parameter while grad mode is off.
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

// Whether an argument is pending. Results of factories do not count, because they need no flush.
bool needs_flush(const Scope& scope, at::ArrayRef<c10::IValue> arguments);

// Computes the pending arguments. The reason in the report is the op's name, followed by
// `separator` and `reason`.
void make_real(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const char* separator,
               const char* reason);

}  // namespace autobatch

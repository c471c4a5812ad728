#include "autobatch/capture/arguments.h"

#include "autobatch/capture/capture.h"
#include "autobatch/capture/shape_inference.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>

namespace autobatch {
namespace {

// Whether the tensor requires grad, and is a leaf or a view of a leaf.
bool is_parameter(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return false;
  const auto is_leaf = [](const at::Tensor& t) {
    const auto* meta = torch::autograd::impl::get_autograd_meta(t);
    return meta != nullptr && meta->grad_fn_ == nullptr;
  };
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) return is_leaf(tensor);
  return is_leaf(view->get_backward_view().base_);  // a view made without grad mode has no grad_fn
}

}  // namespace

void CaptureReasons::add_size(const at::Tensor& tensor) {
  const bool is_symbolic = tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  const int64_t size = is_symbolic ? std::numeric_limits<int64_t>::max() : tensor.numel();
  int64_t& largest = !is_symbolic && is_parameter(tensor) ? largest_parameter_ : largest_other_;
  largest = std::max(largest, size);
}

Scan scan(const OpInfo& info, const Graph& graph, at::ArrayRef<c10::IValue> arguments) {
  const CaptureState& state = CaptureState::current();
  const bool with_grad = state.grad_mode();
  CaptureReasons reasons(state);
  Scan s;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool weight = i < 64 && (info.weight_arguments >> i & 1) != 0;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (const PendingTensor* p = as_pending(tensor)) {
        s.pending = true;
        if (p->graph() != &graph) {  // pending in another scope, or lost
          s.unusable = "a tensor of another scope";
        } else if (p->requires_grad() != graph.requires_grad_now(p->value())) {
          const bool is_view = graph.value(p->value()).kind == ViewKind::kNoGrad;
          if (!is_view) s.unusable = kNewLeaf;
          // Without grad mode, results do not depend on whether the view is a leaf.
          if (is_view && with_grad) s.unusable = "a view made under no_grad()";
        }
      }
      if (!is_plain(*tensor.unsafeGetTensorImpl())) {
        s.plain = false;
        s.sparse |= tensor.layout() != c10::kStrided;
      }
      s.plain &= !has_tangent(tensor);
      s.plain &= !info.integral_only || c10::isIntegralType(tensor.scalar_type(), true);
      // Autograd cannot save an inference tensor for backward, so eager runs the call.
      s.plain &= !tensor.is_inference() || c10::InferenceMode::is_enabled();
      reasons.add(tensor);
      s.weight |= weight;
    });
  }
  s.is_recorded = reasons.is_recorded();
  return s;
}

bool makes_constant(const OpInfo& info, at::ArrayRef<c10::IValue> arguments) {
  if (info.action == Action::kView && !c10::GradMode::is_enabled() && !info.cuts_gradient) {
    const at::Tensor& of = arguments[0].toTensor();
    if (as_pending(of) != nullptr || !of.requires_grad()) return false;
    // Autograd does not know that the result of `_unsafe_view` is a view.
    const bool is_known = info.handle.schema().returns().front().alias_info() != nullptr;
    ViewResult result;
    if (is_known) infer_views(info, arguments, result);
    return result.outcome == ViewOutcome::kViews;  // false for the copy that reshape may make
  }
  bool reads = info.random;
  for (const c10::IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor&) { reads = true; });
  }
  return !reads;
}

bool needs_flush(const Scope& scope, at::ArrayRef<c10::IValue> arguments) {
  bool pending = false;
  for (const c10::IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      pending |= as_pending(tensor) != nullptr && !scope.is_constant(tensor);
    });
  }
  return pending;
}

void make_real(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const char* separator,
               const char* reason) {
  c10::SmallVector<PendingTensor*, 8> pending;
  for (const c10::IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (PendingTensor* p = as_pending(tensor)) pending.push_back(p);
    });
  }
  if (!pending.empty()) ensure_real(pending, info.name + separator + reason);
}

const char* why_not_plain(at::ArrayRef<c10::IValue> arguments) {
  const char* why = "an argument is not a plain dense tensor";
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (has_tangent(tensor)) {
        why = "an argument has a forward-mode gradient (jvp)";
      } else if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) {
        why = "an argument is an inference tensor";
      }
    });
  }
  return why;
}

bool has_tangent(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->fw_grad_ != nullptr;
}

}  // namespace autobatch

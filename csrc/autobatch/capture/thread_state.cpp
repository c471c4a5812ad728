#include "autobatch/graph/thread_state.h"

#include "autobatch/capture/capture.h"
#include "autobatch/scope/scope.h"

#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <utility>

namespace autobatch {
namespace {

// Whether somebody else must see each op run: autograd's engine, functorch's transforms, tracing,
// a dispatch mode, anomaly mode; or, which is asked apart, hooks on saved tensors (checkpointing).
// Most of them show in the thread's included or excluded keys: only then are they asked.
bool must_pass_through(const CaptureState& state) {
  constexpr c10::DispatchKeySet kSomebody({c10::DispatchKey::PreDispatch, c10::DispatchKey::Python,
                                           c10::DispatchKey::Tracer,
                                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  const c10::DispatchKeySet included = state.keys->included();
  if ((included | state.keys->excluded()).has_any(kSomebody)) {
    if (included.has(c10::DispatchKey::PreDispatch) || c10::impl::dispatch_mode_enabled() ||
        torch::jit::tracer::isTracing() || !at::functorch::getDynamicLayerStack().empty()) {
      return true;
    }
  }
  return torch::autograd::get_current_graph_task_id() != -1 || state.formula != nullptr ||
         torch::autograd::AnomalyMode::is_enabled();
}

}  // namespace

bool may_recall(Scope& scope) {
  return scope.options().max_pending == 0 && scope.verifier() == nullptr &&
         !scope.graph().has_writes();
}

Scope* capturing_scope() { return capturing_scope(CaptureState::current()); }

Scope* capturing_scope(const CaptureState& state) {
  Scope* scope = state.scope;
  const bool captures = scope != nullptr && !state.eager && !scope->is_passive() &&
                        state.saved_hooks->stack.empty() && !must_pass_through(state);
  return captures ? scope : nullptr;
}

bool set_eager(bool eager) {
  return std::exchange(capture_state.eager, eager && Scope::current() != nullptr);
}

Scope* eager_scope(const CaptureState& state) {
  Scope* scope = state.eager ? state.scope : nullptr;
  return scope != nullptr && !scope->is_passive() && !must_pass_through(state) ? scope : nullptr;
}

Scope* scope_under_hooks(const CaptureState& state) {
  Scope* scope = state.scope;
  const bool hooked = scope != nullptr && !scope->is_passive() &&
                      !state.saved_hooks->stack.empty() && !must_pass_through(state);
  return hooked ? scope : nullptr;
}

}  // namespace autobatch

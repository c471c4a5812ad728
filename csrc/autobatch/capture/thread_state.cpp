#include "autobatch/graph/thread_state.h"

#include "autobatch/capture/capture.h"
#include "autobatch/capture/memory_order.h"
#include "autobatch/scope/scope.h"

#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

const Watcher kTracing{"tracing"}, kTransform{"a transform (vmap, grad, jvp)"},
    kMode{"a TorchDispatchMode"}, kAnomaly{"anomaly mode"}, kEngine{"autograd's engine"},
    kHooks{"hooks on saved tensors (checkpointing)"};

// Returns the PyTorch feature that must observe each op when it runs: autograd's engine, a
// transform of functorch, tracing, a dispatch mode, or anomaly mode. Hooks on saved tensors
// (checkpointing) are checked separately. Most of these features set an included or excluded
// dispatch key, so their state is queried only if such a key is set.
const Watcher* watcher_but_hooks(const CaptureState& state) {
  constexpr c10::DispatchKeySet kSomebody({c10::DispatchKey::PreDispatch, c10::DispatchKey::Python,
                                           c10::DispatchKey::Tracer,
                                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  const c10::DispatchKeySet included = state.keys->included();
  if ((included | state.keys->excluded()).has_any(kSomebody)) {
    if (torch::jit::tracer::isTracing()) return &kTracing;
    if (!at::functorch::getDynamicLayerStack().empty()) return &kTransform;
    if (included.has(c10::DispatchKey::PreDispatch) || c10::impl::dispatch_mode_enabled()) {
      return &kMode;
    }
  }
  if (torch::autograd::get_current_graph_task_id() != state.graph_task ||
      state.formula != nullptr) {
    return &kEngine;
  }
  return torch::autograd::AnomalyMode::is_enabled() ? &kAnomaly : nullptr;
}

bool must_pass_through(const CaptureState& state) { return watcher_but_hooks(state) != nullptr; }

}  // namespace

bool may_use_call_cache(Scope& scope) {
  return scope.options().max_pending == 0 && scope.verifier() == nullptr;
}

bool may_use_call_cache_first(Scope& scope) {
  const auto looks_at_calls = [](const MemoryOrder* order) { return order->looks_at_calls(); };
  return may_use_call_cache(scope) && std::ranges::none_of(scope.updates().orders, looks_at_calls);
}

bool may_apply_cells(Scope& scope) {
  return may_use_call_cache(scope) && !scope.graph().has_writes();
}

Scope* capturing_scope() { return capturing_scope(CaptureState::current()); }

Scope* reached_scope() {
  const CaptureState& state = CaptureState::current();
  const bool reached = state.keys->included().has(compat::kDeferKey) &&
                       !state.keys->excluded().has(compat::kDeferKey);
  return reached ? capturing_scope(state) : nullptr;
}

Scope* capturing_scope(const CaptureState& state) {
  Scope* scope = state.scope;
  const bool captures = scope != nullptr && !state.eager && !scope->is_passive() &&
                        state.saved_hooks->stack.empty() && !must_pass_through(state);
  return captures ? scope : nullptr;
}

bool set_eager(bool eager) {
  return std::exchange(capture_state.eager, eager && Scope::current() != nullptr);
}

bool set_captures_data(bool captures) {
  return std::exchange(capture_state.captures_data, captures);
}

bool captures_data() { return capture_state.captures_data; }

bool captures_numbers() {
  const CaptureState& state = CaptureState::current();
  // Excludes inference mode, because captured results become inference tensors only when they are
  // computed.
  return state.trace == nullptr && !state.autograd->get_inference_mode() &&
         capturing_scope(state) != nullptr;
}

uint64_t context_word() { return DispatchContext::current().word(); }

Scope* eager_scope(const CaptureState& state) {
  Scope* scope = state.eager ? state.scope : nullptr;
  return scope != nullptr && !scope->is_passive() && !must_pass_through(state) ? scope : nullptr;
}

const Watcher* watcher(const CaptureState& state) {
  const Watcher* found = watcher_but_hooks(state);
  if (found == nullptr && !state.saved_hooks->stack.empty()) return &kHooks;
  return found == &kEngine ? nullptr : found;
}

}  // namespace autobatch

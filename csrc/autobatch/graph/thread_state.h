// Thread-local state that every captured call reads, with pointers to the thread-local state of
// PyTorch. PyTorch's accessors need a call and two look-ups of thread-local memory each time. With
// this structure, one look-up is enough for the whole state.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace autobatch {

class CellTrace;
class FormulaTrace;
class Scope;

struct CaptureState {
  Scope* scope = nullptr;           // open scope that captures, or null
  Scope* paused = nullptr;          // open scope that is paused (payoff.h), or null
  uint64_t calls = 0;               // number of calls that count_call counted (payoff.h)
  uint64_t resume_at = 0;           // value of `calls` at which the paused scope captures again
  CellTrace* trace = nullptr;       // records the cell call that is being traced, or null
  FormulaTrace* formula = nullptr;  // records the derivative formula that is being traced, or null
  bool eager = false;               // true in batch(enabled=False) inside the scope
  bool captures_data = false;       // captures calls even if all tensors are from outside the scope
  bool may_flush = true;            // if false, a flush raises an error
  int graph_task = -1;              // task of autograd's engine in which `scope` was opened, or -1
  const c10::impl::PODLocalDispatchKeySet* keys = nullptr;
  c10::AutogradState* autograd = nullptr;
  const at::impl::SavedTensorDefaultHooksTLS* saved_hooks = nullptr;

  static CaptureState& current();

  // Whether the caller runs below autograd (AutoDispatchBelowAutograd and similar guards).
  bool is_below_autograd() const { return keys->excluded().has(c10::DispatchKey::AutogradOther); }

  // Whether autograd would record a call. `enable_grad` inside `inference_mode` records nothing.
  bool grad_mode() const {
    return autograd->get_grad_mode() && !autograd->get_inference_mode() && !is_below_autograd();
  }
};

extern constinit thread_local CaptureState capture_state;

inline CaptureState& CaptureState::current() {
  CaptureState& state = capture_state;
  if (state.autograd == nullptr) [[unlikely]] {
    state.keys = &c10::impl::raw_local_dispatch_key_set;
    state.autograd = &c10::AutogradState::get_tls_state();
    state.saved_hooks = &at::SavedTensorDefaultHooks::get_tls_state();
  }
  return state;
}

}  // namespace autobatch

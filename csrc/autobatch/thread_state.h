// Where PyTorch keeps what every captured call asks of its thread. Its own functions for these take
// a call and two look-ups of thread-local memory each time.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace autobatch {

struct ThreadState {
  const c10::impl::PODLocalDispatchKeySet* keys = nullptr;
  c10::AutogradState* autograd = nullptr;
  const at::impl::SavedTensorDefaultHooksTLS* saved_hooks = nullptr;

  static const ThreadState& current();

  // Whether the caller works below autograd (AutoDispatchBelowAutograd and its like).
  bool is_below_autograd() const { return keys->excluded().has(c10::DispatchKey::AutogradOther); }

  // Whether autograd would record a call. `enable_grad` inside `inference_mode` records nothing.
  bool records() const {
    return autograd->get_grad_mode() && !autograd->get_inference_mode() && !is_below_autograd();
  }
};

extern constinit thread_local ThreadState thread_state;

inline const ThreadState& ThreadState::current() {
  ThreadState& state = thread_state;
  if (state.autograd == nullptr) [[unlikely]] {
    state = {&c10::impl::raw_local_dispatch_key_set, &c10::AutogradState::get_tls_state(),
             &at::SavedTensorDefaultHooks::get_tls_state()};
  }
  return state;
}

}  // namespace autobatch

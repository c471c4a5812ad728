#pragma once

#include "autobatch/common/compat.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <utility>

namespace autobatch {

// While a guard lives, the TorchDispatchModes of the program see no ops of this thread. Python code
// that runs in the meantime (a compiler, a custom op) can still enter modes of its own.
class NoDispatchModeGuard {
  using Modes = c10::impl::TorchDispatchModeTLS;

 public:
  NoDispatchModeGuard() {
    if (!c10::impl::dispatch_mode_enabled()) return;
    modes_ = Modes::get_state();
    Modes::set_state({});
  }
  ~NoDispatchModeGuard() {
    if (modes_.has_value()) Modes::set_state(*std::move(modes_));
  }
  NoDispatchModeGuard(const NoDispatchModeGuard&) = delete;
  NoDispatchModeGuard& operator=(const NoDispatchModeGuard&) = delete;

 private:
  std::optional<Modes> modes_;
};

// While a guard lives, ops of this thread run as in a flush. The ops are neither captured nor
// recorded by autograd, and the program's modes do not see them. Results are not inference tensors.
class PlainStateGuard {
  const NoDispatchModeGuard no_modes_;
  const c10::impl::ExcludeDispatchKeyGuard no_capture_{compat::kDeferKey};
  const c10::InferenceMode no_inference_{false};
  const c10::AutoGradMode no_grad_{false};
};

}  // namespace autobatch

#pragma once

#include "autobatch/common/compat.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <utility>

namespace autobatch {

// While a guard exists, ops of this thread do not reach the program's TorchDispatchModes. Python
// code that runs while the guard exists (a compiler, a custom op) can still enter new modes.
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

// While a guard exists, ops of this thread run like the ops of a flush. The ops are not captured,
// autograd does not record them, and they do not reach the program's modes. The results are not
// inference tensors.
class PlainStateGuard {
  const NoDispatchModeGuard no_modes_;
  const c10::impl::ExcludeDispatchKeyGuard no_capture_{compat::kDeferKey};
  const c10::InferenceMode no_inference_{false};
  const c10::AutoGradMode no_grad_{false};
};

}  // namespace autobatch

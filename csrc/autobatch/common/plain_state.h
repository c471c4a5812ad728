#pragma once

#include "autobatch/common/compat.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace autobatch {

// While a guard lives, ops of this thread run as in a flush: they are not captured, autograd does
// not record them, no TorchDispatchMode of the program sees them, and their results are not
// inference tensors.
class PlainStateGuard {
  const c10::impl::ExcludeDispatchKeyGuard no_mode_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  const c10::impl::ExcludeDispatchKeyGuard no_capture_{compat::kDeferKey};
  const c10::InferenceMode no_inference_{false};
  const c10::AutoGradMode no_grad_{false};
};

}  // namespace autobatch

#pragma once

#include "autobatch/common/compat.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace autobatch {

// While one lives, ops of this thread run as in a flush: none is captured, autograd records none,
// no TorchDispatchMode of the program's sees them, and their results are no inference tensors.
class PlainStateGuard {
  const c10::impl::ExcludeDispatchKeyGuard no_mode_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  const c10::impl::ExcludeDispatchKeyGuard no_capture_{compat::kDeferKey};
  const c10::InferenceMode no_inference_{false};
  const c10::AutoGradMode no_grad_{false};
};

}  // namespace autobatch

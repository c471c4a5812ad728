#include "autobatch/graph/dispatch_context.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/graph/thread_state.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>

namespace autobatch {
namespace {

using enum c10::DispatchKey;
constexpr c10::DispatchKeySet kAutocastOnAccelerator({AutocastCUDA, AutocastXPU, AutocastMPS,
                                                      AutocastPrivateUse1});

void set_autocast(const DispatchContext& context) {
  at::autocast::set_autocast_enabled(at::kCPU, context.autocast_cpu);
  at::autocast::set_autocast_enabled(accelerator(), context.autocast_cuda);
  at::autocast::set_autocast_dtype(at::kCPU, context.autocast_cpu_dtype);
  at::autocast::set_autocast_dtype(accelerator(), context.autocast_cuda_dtype);
  if (c10::get_default_dtype_as_scalartype() != context.default_dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(context.default_dtype));
  }
}

// Computes DispatchContext::word for a context without autocast.
uint64_t plain_word(bool grad_mode, bool inference_mode, c10::ScalarType default_dtype) {
  return (grad_mode ? 1u : 0u) | (inference_mode ? 2u : 0u) |
         static_cast<uint64_t>(default_dtype) << 8;
}

}  // namespace

constinit thread_local CaptureState capture_state;

DispatchContext DispatchContext::current() {
  DispatchContext context;
  const CaptureState& state = CaptureState::current();
  context.inference_mode = state.autograd->get_inference_mode();
  context.grad_mode = state.grad_mode();
  // Autocast is enabled on a device if the device's autocast key is not excluded.
  const c10::DispatchKeySet excluded = state.keys->excluded();
  context.autocast_cpu = !excluded.has(AutocastCPU);
  context.autocast_cuda = !excluded.has_all(kAutocastOnAccelerator);
  if (context.autocast()) {
    context.autocast_cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
    context.autocast_cuda_dtype = at::autocast::get_autocast_dtype(accelerator());
  }
  context.default_dtype = c10::get_default_dtype_as_scalartype();
  return context;
}

uint64_t DispatchContext::word() const {
  uint64_t word = plain_word(grad_mode, inference_mode, default_dtype) | (autocast_cpu ? 4u : 0u) |
                  (autocast_cuda ? 8u : 0u);
  if (autocast()) {
    word |= static_cast<uint64_t>(autocast_cpu_dtype) << 16;
    word |= static_cast<uint64_t>(autocast_cuda_dtype) << 24;
  }
  return word;
}

CallContext::CallContext(const CaptureState& state) : grad_mode(state.grad_mode()) {
  constexpr c10::DispatchKeySet kAutocast = kAutocastOnAccelerator.add(AutocastCPU);
  const bool casts = !state.keys->excluded().has_all(kAutocast);
  word = casts ? DispatchContext::current().word()
               : plain_word(grad_mode, state.autograd->get_inference_mode(),
                            c10::get_default_dtype_as_scalartype());
}

ContextGuard::ContextGuard(const DispatchContext& context)
    : before_(DispatchContext::current()),
      cache_before_(at::autocast::is_autocast_cache_enabled()) {
  before_.autocast_cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  before_.autocast_cuda_dtype = at::autocast::get_autocast_dtype(accelerator());
  DispatchContext target = context;
  if (!target.autocast()) {  // the context contains no autocast dtypes
    target.autocast_cpu_dtype = before_.autocast_cpu_dtype;
    target.autocast_cuda_dtype = before_.autocast_cuda_dtype;
  }
  set_autocast(target);
  // The autocast cache identifies a weight by its tensor object. A lookup for a weight of a batch
  // would never succeed, because each call of the batch gets a new view of the weight.
  at::autocast::set_autocast_cache_enabled(false);
  if (context.inference_mode) inference_.emplace(true);
}

ContextGuard::~ContextGuard() {
  inference_.reset();
  set_autocast(before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

}  // namespace autobatch

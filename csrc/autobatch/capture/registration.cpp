// Registers capture with the dispatcher.
#include "autobatch/capture/capture.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/rules/factories.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <torch/library.h>

namespace autobatch {
namespace {

using torch::jit::Stack;

// Handles the keys of PyTorch that must run before capture, but have a lower priority than the
// capture key (compat::kBeforeCapture).
void capture_in_turn(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    // The functorch transform handles the call, and then dispatches the ops that it calls.
    return op.redispatchBoxed(keys & kBelowCapture, stack);
  }
  // Saves the thread's dispatch keys, because PyTorch calls __torch_dispatch__ with the saved keys.
  const at::impl::MaybeSetTLSOnEntryGuard on_entry;
  capture_as(op_info(op), keys.remove(c10::DispatchKey::PythonTLSSnapshot), stack);
}

}  // namespace

void capture(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (keys.has_any(compat::kBeforeCapture)) return capture_in_turn(op, keys, stack);
  capture_as(op_info(op), keys, stack);
}

void register_capture() {
  register_memory_ops();
  static torch::Library* library = [] {
    auto* lib =
        new torch::Library(torch::Library::IMPL, "_", compat::kDeferKey, __FILE__, __LINE__);
    lib->fallback(torch::CppFunction::makeFromBoxedFunction<&capture>());
    return lib;
  }();
  static torch::Library* unboxed = [] {
    auto* lib =
        new torch::Library(torch::Library::IMPL, "aten", compat::kDeferKey, __FILE__, __LINE__);
    register_unboxed(*lib);
    return lib;
  }();
  (void)library, (void)unboxed;
}

}  // namespace autobatch

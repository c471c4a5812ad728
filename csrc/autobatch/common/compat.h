// All code that depends on the version of PyTorch is in this file and in compat_indexing.h. PyTorch
// 2.11 to 2.15 are supported. This file also chooses the dispatch key for capture (kDeferKey).
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace autobatch::compat {

// The dispatch key on which the boxed fallback is registered. The key is above Autocast,
// functorch's wrappers and Autograd. So composite ops are not decomposed before capture, and
// autograd does not record the ops of a single example. PyTorch registers no kernels of its own on
// two keys: DeferredInit and TESTING_ONLY_GenericMode. DeferredInit (used by torchdistx) has the
// right position for capture, but PyTorch has few key bits left and may remove this key.
// TESTING_ONLY_GenericMode exists for PyTorch's own C++ tests. This library uses
// TESTING_ONLY_GenericMode if there is no DeferredInit, or if the build selects it (CMake's
// AUTOBATCH_CAPTURE_KEY).
template <class Key>
constexpr Key default_capture_key() {
  if constexpr (requires { Key::DeferredInit; }) {
    return Key::DeferredInit;
  } else {
    return Key::TESTING_ONLY_GenericMode;
  }
}
#ifdef AUTOBATCH_CAPTURE_KEY
inline constexpr c10::DispatchKey kDeferKey = c10::DispatchKey::AUTOBATCH_CAPTURE_KEY;
#else
inline constexpr auto kDeferKey = default_capture_key<c10::DispatchKey>();
#endif

// Dispatch keys of PyTorch that have a lower priority than kDeferKey, but must handle a call before
// capture. Capture passes the call to these keys first (registration.cpp). The set is empty if
// kDeferKey is DeferredInit.
inline constexpr c10::DispatchKeySet kBeforeCapture =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDeferKey) &
    c10::DispatchKeySet(
        {c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
static_assert(kDeferKey > c10::DispatchKey::FuncTorchGradWrapper,
              "the key must lie above autograd, autocast and functorch's wrappers");

// autograd::Node is held by std::shared_ptr up to PyTorch 2.12, and by c10::intrusive_ptr from 2.13
// on.
using NodePtr = std::remove_cv_t<decltype(torch::autograd::Edge::function)>;

template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...));
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

// Whether the autograd metadata of a tensor equals the metadata of a new tensor, except for
// requires_grad. Returns false for versions after PyTorch 2.15, whose AutogradMeta may have members
// that this function does not check.
inline bool is_as_made(const torch::autograd::AutogradMeta& meta) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 15
  return meta.name_.empty() && !meta.grad_.defined() && meta.grad_fn_ == nullptr &&
         meta.grad_accumulator_.expired() && meta.fw_grad_ == nullptr && meta.hooks_.empty() &&
         meta.cpp_hooks_list_ == nullptr && meta.post_acc_grad_hooks_ == nullptr &&
         !meta.retains_grad_ && !meta.is_view_ && meta.output_nr_ == 0 &&
         !meta.grad_dtype_.has_value() && !meta.allow_grad_dtype_mismatch_;
#else
  (void)meta;
  return false;
#endif
}

// Whether a profiler records the arguments of ops. `State` is
// torch::profiler::impl::ProfilerStateBase. The class has a global state and a thread-local state.
// Up to PyTorch 2.13, one accessor covers both states. From 2.14 on, each of the two states has a
// separate accessor.
template <class State>
bool records_arguments() {
  const auto records = [](const auto& state) {
    return state != nullptr && state->config().report_input_shapes;
  };
  if constexpr (requires { State::get(); }) {
    return records(State::get());
  } else {
    return records(State::getGlobal()) || records(State::getTLS());
  }
}

}  // namespace autobatch::compat

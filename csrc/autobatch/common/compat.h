// Everything that depends on a particular PyTorch version, and the one place that names the
// dispatch key we borrow. Supported: PyTorch 2.11 to 2.15.
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

// The key our boxed fallback is registered on. It sits above Autocast, functorch's wrappers and
// Autograd, so composite ops arrive whole and nothing per instance is recorded by autograd.
// Nothing in stock PyTorch registers on either of two such keys. DeferredInit (torchdistx used it)
// lies where capture belongs, but PyTorch is short of key bits and may drop it. The other is for
// PyTorch's own C++ tests: it is borrowed where there is no DeferredInit, or where the build says
// so (CMake's AUTOBATCH_CAPTURE_KEY).
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

// What of PyTorch's comes after our key in the dispatcher's order, though it must see a call before
// capture does: capture gives way to it (registration.cpp). None for DeferredInit.
inline constexpr c10::DispatchKeySet kBeforeCapture =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDeferKey) &
    c10::DispatchKeySet(
        {c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
static_assert(kDeferKey > c10::DispatchKey::FuncTorchGradWrapper,
              "the key must lie above autograd, autocast and functorch's wrappers");

// autograd::Node is held by std::shared_ptr up to 2.12 and by c10::intrusive_ptr from 2.13 on.
using NodePtr = std::remove_cv_t<decltype(torch::autograd::Edge::function)>;

template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...));
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

// Whether nobody has done anything to the metadata of a new tensor, but say whether it requires
// grad. Where PyTorch may have members that are not asked here, the answer is no.
inline bool is_as_made(const torch::autograd::AutogradMeta& meta) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 15
  const auto grad_dtype_is_as_made = [](const auto& m) {  // from 2.10 on
    if constexpr (requires { m.grad_dtype_, m.allow_grad_dtype_mismatch_; }) {
      return !m.grad_dtype_.has_value() && !m.allow_grad_dtype_mismatch_;
    } else {
      return true;
    }
  };
  return meta.name_.empty() && !meta.grad_.defined() && meta.grad_fn_ == nullptr &&
         meta.grad_accumulator_.expired() && meta.fw_grad_ == nullptr && meta.hooks_.empty() &&
         meta.cpp_hooks_list_ == nullptr && meta.post_acc_grad_hooks_ == nullptr &&
         !meta.retains_grad_ && !meta.is_view_ && meta.output_nr_ == 0 &&
         grad_dtype_is_as_made(meta);
#else
  (void)meta;
  return false;
#endif
}

// Whether a profiler records ops' arguments. `State` is torch::profiler::impl::ProfilerStateBase,
// which had one way to both of its states up to 2.13 and has two from 2.14 on.
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

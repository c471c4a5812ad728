// The C++ API, implemented with Scope.
#include "autobatch/autobatch.h"

#include "autobatch/common/compat.h"
#include "autobatch/common/pool.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/schedule/schedule_cache.h"
#include "autobatch/scope/scope.h"

#include <torch/csrc/autograd/autograd.h>

#include <exception>
#include <utility>

namespace autobatch {

struct Roots {
  std::vector<at::Tensor> tensors, gradients;
};

BatchScope::BatchScope(const ScopeOptions& options)
    : scope_(std::make_shared<Scope>(options)->enter()),
      roots_(std::make_unique<Roots>()),
      exceptions_(std::uncaught_exceptions()) {}

BatchScope::~BatchScope() {
  if (closed_) return;
  std::uncaught_exceptions() > exceptions_ ? scope_->exit(/*discard_errors=*/true) : close();
}

void BatchScope::flush() { scope_->flush("BatchScope::flush()"); }

void BatchScope::backward(const at::Tensor& root, const at::Tensor& gradient) {
  TORCH_CHECK(!closed_, "torch_autobatch: BatchScope::backward(): the scope is closed");
  TORCH_CHECK(root.defined(),
              "torch_autobatch: BatchScope::backward(): a root is an undefined tensor");
  TORCH_CHECK(gradient.defined() || root.numel() == 1,
              "grad can be implicitly created only for scalar outputs, but BatchScope::backward() "
              "got a root of shape ",
              root.sizes(), " without a gradient");
  roots_->tensors.push_back(root);
  roots_->gradients.push_back(gradient);
}

void BatchScope::close() {
  if (closed_) return;
  scope_->check_thread();
  closed_ = true;
  const std::unique_ptr<Roots> roots = std::exchange(roots_, nullptr);
  scope_->exit();
  if (!roots->tensors.empty()) torch::autograd::backward(roots->tensors, roots->gradients);
}

const Report& BatchScope::report() const { return scope_->report(); }

bool is_pending(const at::Tensor& tensor) {
  const PendingTensor* pending = as_pending(tensor);
  return pending != nullptr && pending->is_pending();
}

size_t empty_cache() { return forget_schedules() + empty_pool(); }

std::string build_info() {
  std::string info =
      "torch-autobatch " AUTOBATCH_VERSION ", built with torch " AUTOBATCH_TORCH_VERSION;
#if AUTOBATCH_WITH_CUDA
  info += ", with CUDA kernels";
#else
  info += ", without CUDA kernels";
#endif
  info += has_map() ? ", with autobatch::map" : ", without autobatch::map";
  return info + ", capture on the dispatch key " + c10::toString(compat::kDeferKey);
}

}  // namespace autobatch

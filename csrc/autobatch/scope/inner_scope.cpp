#include "autobatch/scope/inner_scope.h"

#include "autobatch/common/compat.h"
#include "autobatch/scope/scope.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace autobatch {

InnerScope::InnerScope()
    : outer_(CaptureState::current()),
      was_included_(c10::impl::tls_is_dispatch_key_included(compat::kDeferKey)),
      was_excluded_(c10::impl::tls_is_dispatch_key_excluded(compat::kDeferKey)),
      scope_(std::make_shared<Scope>(ScopeOptions{})) {
  CaptureState inner;
  inner.keys = outer_.keys;
  inner.autograd = outer_.autograd;
  inner.saved_hooks = outer_.saved_hooks;
  inner.captures_data = true;
  inner.graph_task = torch::autograd::get_current_graph_task_id();
  capture_state = inner;
  c10::impl::tls_set_dispatch_key_excluded(compat::kDeferKey, false);
  scope_->enter();
}

InnerScope::~InnerScope() {
  if (scope_ == nullptr) return;
  try {
    close(true);
  } catch (...) {  // the error that is already being raised takes precedence
  }
}

void InnerScope::close(bool discard_errors) {
  struct Restore {
    const InnerScope& scope;
    ~Restore() {
      capture_state = scope.outer_;
      c10::impl::tls_set_dispatch_key_included(compat::kDeferKey, scope.was_included_);
      c10::impl::tls_set_dispatch_key_excluded(compat::kDeferKey, scope.was_excluded_);
    }
  } const restore{*this};
  std::exchange(scope_, nullptr)->exit(discard_errors);
}

}  // namespace autobatch

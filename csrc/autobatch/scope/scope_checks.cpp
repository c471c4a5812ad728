// The functions of Scope for deferred checks (deferred_checks.h).
#include "autobatch/backward/backward.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/fibers/fibers.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <algorithm>
#include <exception>

namespace autobatch {

void Scope::check_later(const at::Tensor& asked, bool expected, std::unique_ptr<Check> check) {
  CellTrace::break_off("it checks a value", "");
  Fiber* fiber = Fiber::current();
  if (fiber != nullptr) fiber->note_check();
  checks_.add(asked, expected, fiber == nullptr ? 0 : fiber->number(), std::move(check));
  ++report_.checks;
}

void Scope::settle_checks(const std::string& reason) {
  const std::vector<PendingTensor*> asked = checks_.asked();
  compute(asked, reason, /*values_only=*/true);
  raise_failed_check(nullptr);
}

bool Scope::is_checked(const at::Tensor& tensor) const {
  const PendingTensor* pending = as_pending(tensor);
  if (pending == nullptr || pending->graph() != graph_.get() || !is_own_thread()) return false;
  const ValueId base = graph_->value(pending->value()).base;
  const std::vector<PendingTensor*> asked = checks_.asked();
  return std::ranges::any_of(asked, [&](const PendingTensor* other) {
    return other->graph() == graph_.get() && graph_->value(other->value()).base == base;
  });
}

// Verifies the deferred checks of tensors that are still pending although their values are
// computed. While a flush runs, the flush verifies the checks.
void Scope::look_at_checks() {
  if (!checks_.any_waiting() || !is_own_thread()) return;
  const auto find = [this](const PendingTensor& tensor) -> std::optional<Region> {
    if (!is_computed(tensor)) return std::nullopt;
    return graph_->open_record()->store.region(graph_->tape(), tensor.value());
  };
  const auto cause_of = [this](const PendingTensor& tensor) {
    if (const std::exception_ptr cause = loss_of(tensor)) return cause;
    try {
      tensor.check_not_lost();
    } catch (...) {
      return std::current_exception();
    }
    return std::exception_ptr();
  };
  const std::shared_ptr<void> nobody_dies = host_hold();
  checks_.settle(find, cause_of);
}

// Called after a flush. The error of a failed check of the running code takes precedence over the
// error of an op, because the error of the op is usually a consequence of the failed check.
void Scope::raise_failed_check(const std::exception_ptr& error) {
  look_at_checks();
  if (is_own_thread()) {
    const Fiber* fiber = Fiber::current();
    const std::exception_ptr failed = failed_check(fiber == nullptr ? 0 : fiber->number());
    if (failed) std::rethrow_exception(failed);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace autobatch

#include "autobatch/capture/memory_updates.h"

#include "autobatch/capture/arguments.h"
#include "autobatch/capture/memory_order.h"
#include "autobatch/common/compat.h"
#include "autobatch/fibers/fibers.h"
#include "autobatch/graph/foreign_memory.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/storage_aliases.h"
#include "autobatch/scope/scope.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = at::ArrayRef<c10::IValue>;

bool is_real_number(const c10::IValue& value) { return value.isInt() || value.isDouble(); }

// Whether eager accepts the tensor as an operand of an update of `target`. If eager rejects an
// operand, it raises the error at the call, so such a call is not kept as an update.
bool is_source_for(const Tensor& target, const Tensor& source) {
  if (source.unsafeGetTensorImpl()->is_wrapped_number()) return !source.is_complex();
  return as_pending(source) != nullptr && source.scalar_type() == target.scalar_type() &&
         source.device() == target.device() && at::is_expandable_to(source.sizes(), target.sizes());
}

bool is_on(const MemoryClaim& claim, const c10::Storage& storage) {
  return claim.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

bool is_claimed(Scope& scope, const c10::Storage& storage) {
  if (is_ordered(scope, storage)) return true;
  return std::ranges::any_of(scope.updates().claims,
                             [&](const MemoryClaim& claim) { return is_on(claim, storage); });
}

bool is_target(Scope& scope, const Tensor& tensor) {
  Graph& graph = scope.graph();
  if (!is_plain(*tensor.unsafeGetTensorImpl())) return false;
  if (tensor.requires_grad() || !tensor.is_floating_point() || tensor.numel() == 0) return false;
  if (!owns_memory(tensor) || may_change_unseen(tensor)) return false;
  if (graph.geometries().intern(tensor.sizes(), tensor.strides())->overlapping) return false;
  return graph.is_stale(tensor) ? !is_claimed(scope, tensor.storage())
                                : !graph.reads_storage_of(tensor);
}

// Adds the pending tensors among the arguments to `found`.
void find_pending(Arguments arguments, std::vector<Tensor>& found) {
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (as_pending(tensor) != nullptr) found.push_back(tensor);
    });
  }
}

std::vector<c10::Storage> find_stale(const Graph& graph, Arguments arguments) {
  std::vector<c10::Storage> found;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (as_pending(tensor) == nullptr && tensor.layout() == c10::kStrided && !tensor.is_meta() &&
          graph.is_stale(tensor)) {
        found.push_back(tensor.storage());
      }
    });
  }
  return found;
}

void drop_updates(Scope& scope) {
  auto& waiting = scope.updates().waiting;
  for (const MemoryUpdate& update : waiting) scope.graph().forget_stale(update.storage);
  waiting.clear();
}

// Waits for the end of an earlier instance that has to use one of the storages first. Returns false
// if there is no such instance.
bool await_claim(Scope& scope, const std::vector<c10::Storage>& storages) {
  Fiber* fiber = Fiber::suspendable();
  if (fiber == nullptr) return false;
  for (const c10::Storage& storage : storages) {
    if (is_ordered(scope, storage) && fiber->wait_for_earlier()) return true;
    for (const MemoryClaim& claim : scope.updates().claims) {
      if (is_on(claim, storage) && fiber->wait_for_end(claim.fiber)) return true;
    }
  }
  return false;
}

// Finishes the updates of the stale storages, so that the running code can use the memory.
void finish(Scope& scope, const std::vector<c10::Storage>& stale, const std::string& reason) {
  apply_updates(scope);
  while (await_claim(scope, stale)) {
  }
  const auto is_updated = [&](const MemoryUpdate& update) {
    return std::ranges::any_of(stale, [&](const c10::Storage& storage) {
      return update.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    });
  };
  // While an instance of a map is suspended in compute(), other instances may add updates.
  while (std::ranges::any_of(scope.updates().waiting, is_updated)) {
    std::vector<Tensor> sources;  // kept alive: another instance may apply the updates
    for (const MemoryUpdate& update : scope.updates().waiting) {
      find_pending(update.arguments, sources);
    }
    c10::SmallVector<PendingTensor*, 8> pending;
    for (const Tensor& source : sources) pending.push_back(as_pending(source));
    const ClaimsHeld claims(scope, stale);
    scope.compute(pending, reason);
    apply_updates(scope);
  }
}

template <class Is>
bool all_written(const OpInfo& op, Arguments arguments, const Is& is) {
  bool all = true;
  for_each_written(op, arguments, [&](const Tensor& tensor) { all = all && is(tensor); });
  return all;
}

}  // namespace

bool is_update(Scope& scope, const OpInfo& op, Arguments arguments) {
  const bool is_given = op.write == WriteKind::kGiven || op.write == WriteKind::kZero;
  const bool is_pointwise = op.write == WriteKind::kCompute && op.handle.hasTag(at::Tag::pointwise);
  if ((!is_given && !is_pointwise) || !arguments[0].isTensor()) return false;
  const Tensor& target = arguments[0].toTensor();
  if (as_pending(target) != nullptr) return false;
  bool all_fit = true, any_pending = false, requires_grad = false;
  // The other arguments of `copy_` have no influence on the result.
  const size_t end = is_given ? std::min<size_t>(arguments.size(), 2) : arguments.size();
  for (const c10::IValue& argument : arguments.slice(1, end - 1)) {
    if (argument.isNone() || is_real_number(argument)) continue;
    if (!argument.isTensor()) return false;
    const Tensor& source = argument.toTensor();
    all_fit = all_fit && is_source_for(target, source);
    any_pending = any_pending || as_pending(source) != nullptr;
    requires_grad = requires_grad || source.requires_grad();
  }
  if (!all_fit || (requires_grad && c10::GradMode::is_enabled())) return false;
  return (any_pending || scope.graph().is_stale(target)) && is_target(scope, target);
}

void add_update(Scope& scope, const c10::OperatorHandle& op, std::vector<c10::IValue> arguments) {
  const c10::Storage storage = arguments[0].toTensor().storage();
  scope.graph().note_stale(storage);
  scope.updates().waiting.push_back({op, std::move(arguments), storage});
}

bool record_update(Scope& scope, const OpInfo& op, Arguments arguments) {
  if (!is_update(scope, op, arguments)) return false;
  const Tensor& target = arguments[0].toTensor();
  std::vector<c10::IValue> kept(arguments.begin(), arguments.end());
  for (c10::IValue& argument : kept) {
    // The program may write to the source before the update is applied.
    if (argument.isTensor() && as_pending(argument.toTensor()) != nullptr) {
      argument = at::clone(argument.toTensor().detach());
    }
  }
  scope.before_write(target);
  auto& impl = *target.unsafeGetTensorImpl();
  if (impl.version_counter().enabled()) impl.bump_version();
  add_update(scope, op.handle, std::move(kept));
  return true;
}

void apply_updates(Scope& scope) {
  auto& waiting = scope.updates().waiting;
  if (waiting.empty()) return;
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  // The ops of the updates must not increase the version counters. Where eager increases a counter,
  // record_update() has already done so.
  const at::AutoDispatchBelowADInplaceOrView unseen;
  while (!waiting.empty()) {
    std::vector<Tensor> sources;
    find_pending(waiting.front().arguments, sources);
    const auto is_lost = [](const Tensor& source) { return as_pending(source)->is_lost(); };
    if (std::ranges::any_of(sources, is_lost)) return drop_updates(scope);
    if (!sources.empty()) return;
    MemoryUpdate update = std::move(waiting.front());
    waiting.pop_front();
    scope.graph().forget_stale(update.storage);
    update.op.callBoxed(update.arguments);
  }
}

void finish_updates(Scope& scope, const std::string& op, Arguments arguments) {
  const std::vector<c10::Storage> stale = find_stale(scope.graph(), arguments);
  if (!stale.empty()) finish(scope, stale, op + ": needs memory that a captured op updates");
}

void prepare_memory(Scope& scope, const OpInfo& op, Arguments arguments) {
  if (!scope.graph().has_stale()) return;
  const auto is_free = [&](const Tensor& to) { return !is_ordered(scope, to.storage()); };
  const bool may_update =
      op.action_on(arguments) == Action::kMutate &&
      (op.keeps_statistics ? all_written(op, arguments, is_free) : is_update(scope, op, arguments));
  if (!may_update) finish_updates(scope, op.name, arguments);
  for (MemoryOrder* order : scope.updates().orders) order->note(op, arguments);
}

void finish_updates(const Tensor& tensor, const char* read) {
  Scope* scope = Scope::current();
  if (scope == nullptr || !scope->graph().has_stale()) return;
  const std::vector<c10::Storage> stale = find_stale(scope->graph(), {c10::IValue(tensor)});
  if (!stale.empty()) {
    finish(*scope, stale, std::string(read) + " of memory that a captured op updates");
  }
}

bool await_readers(Scope& scope, const Tensor& written) {
  Fiber* fiber = Fiber::current();
  const PendingTensor* target = fiber == nullptr ? nullptr : as_pending(written);
  if (target == nullptr || target->graph() != &scope.graph()) return false;
  Graph& graph = scope.graph();
  const ValueId base = graph.value(target->value()).base;
  const Memory* memory = graph.memory_of(base);
  if (memory == nullptr || memory->writer == fiber->number()) return false;
  if (Fiber::suspendable() == nullptr) return false;
  const uint64_t reader = fiber->find_reader([&](const PendingTensor* wanted) {
    return wanted->graph() == &graph && graph.value(wanted->value()).base == base;
  });
  return reader != 0 && fiber->wait_for_end(reader);
}

ClaimsHeld::ClaimsHeld(Scope& scope, std::vector<c10::Storage> storages) : scope_(scope) {
  const Fiber* fiber = Fiber::suspendable();
  if (fiber == nullptr) return;
  for (c10::Storage& storage : storages) {
    scope.graph().note_stale(storage);
    auto& claims = scope.updates().claims;
    claims_.push_back(claims.insert(claims.end(), {std::move(storage), fiber->number()}));
  }
}

ClaimsHeld::~ClaimsHeld() {
  for (const auto& claim : claims_) {
    scope_.graph().forget_stale(claim->storage);
    scope_.updates().claims.erase(claim);
  }
}

ClaimsHeld claim_written(Scope& scope, const OpInfo& op, Arguments arguments) {
  std::vector<c10::Storage> storages;
  if (Fiber::current() == nullptr) return ClaimsHeld(scope, std::move(storages));
  std::vector<Tensor> pending;
  find_pending(arguments, pending);
  for_each_written(op, arguments, [&](const Tensor& to) {
    if (as_pending(to) == nullptr && !pending.empty()) storages.push_back(to.storage());
  });
  return ClaimsHeld(scope, std::move(storages));
}

}  // namespace autobatch

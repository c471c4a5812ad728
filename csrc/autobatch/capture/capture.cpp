#include "autobatch/capture/capture.h"

#include "autobatch/backward/overwrites.h"
#include "autobatch/capture/arguments.h"
#include "autobatch/capture/deferred_writes.h"
#include "autobatch/capture/known_values.h"
#include "autobatch/capture/masked_select.h"
#include "autobatch/capture/memory_updates.h"
#include "autobatch/capture/new_leaves.h"
#include "autobatch/capture/number_operands.h"
#include "autobatch/capture/out_variants.h"
#include "autobatch/capture/running_statistics.h"
#include "autobatch/capture/shape_inference.h"
#include "autobatch/capture/try_cached_call.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/compat.h"
#include "autobatch/debug/verify.h"
#include "autobatch/derivatives/derivative_formula.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/rules/decompositions.h"
#include "autobatch/scope/scope.h"

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

namespace autobatch {
namespace {

using torch::jit::Stack;

constexpr const char* kEager = "in batch(enabled=False)";

// Whether the op is an in-place op whose kernel only calls other ops (`ldexp_`).
bool writes_in_parts(const OpInfo& info) {
  return info.decomposes && info.written_arguments == 1 &&
         info.handle.operator_name().name.ends_with("_");
}

// Handles one call as specified by the table in op_registry.cpp.
class Call {
 public:
  Call(Scope& scope, const OpInfo& info, c10::DispatchKeySet keys, Stack* stack)
      : lock_(scope), scope_(scope), info_(info), keys_(keys), stack_(stack) {}

  void run() {
    if (info_.is_verdict && scope_.is_constant(arguments()[0].toTensor())) return run_on_constant();
    prepare_memory(scope_, info_, arguments());
    if (info_.index_argument >= 0) look_at_indices();
    if (info_.fails_for_values && host_may_catch()) left_to_eager_ = true;
    if (call_with_number_as_tensor(scope_, info_, stack_)) return;
    if (try_cached_call()) return;
    const size_t limit = scope_.options().max_pending;
    if (limit != 0 && scope_.graph().num_waiting() >= limit) {
      scope_.relieve();
      return info_.handle.callBoxed(stack_);
    }
    Scan s = scan(info_, scope_.graph(), arguments());
    if (s.unusable == kNewLeaf && capture_new_leaves(scope_, arguments())) {
      s = scan(info_, scope_.graph(), arguments());
    }
    if (s.unusable != nullptr) {
      CellTrace::break_off("it uses a tensor of another scope or a new leaf", info_.name);
      make_real(info_, arguments(), " on ", s.unusable);
      return info_.handle.callBoxed(stack_);  // the arguments' dispatch keys have changed
    }
    if (info_.is_cast && !s.pending && CastingGuard::is_casting()) return cast_once();
    const Action action = decide(s);
    if (action == Action::kDefer && is_cast_by_autocast()) return run_autocast();
    switch (action) {
      case Action::kView:
        if (!view()) at_once("not a view that can be deferred");
        return;
      case Action::kMetadata:
        return run_as_it_is();
      case Action::kDefer:
        if (defer()) return;
        [[fallthrough]];
      case Action::kDecompose:
        if (const Decomposition* other = decomposition_of(info_, arguments())) {
          return named([this, other] { run_decomposition(*other); });
        }
        if (action == Action::kDefer && !info_.decomposes) {
          return at_once("no batching for these arguments");
        }
        return named([this] { run_composite(); });
      case Action::kFactory:
        return factory();
      case Action::kMutate:
        return mutate(s);
      case Action::kAtOnce:
        if (!s.pending) {
          if (CellTrace::current() != nullptr && !makes_constant(info_, arguments())) {
            CellTrace::break_off("it calls an op that runs eagerly", info_.name);
          }
          return run_as_it_is();
        }
        if (at::Tensor r;
            s.plain && (r = record_masked_select(scope_, info_, arguments())).defined()) {
          return give({r}, false);
        }
        if (!s.plain) return at_once(why_not_plain(arguments()));
        return at_once(left_to_eager_ && info_.fails_for_values ? kMayBeCaught : kNeedsValues);
    }
  }

  // Runs the call as if no scope were open. If the call writes to memory, the pending ops that read
  // this memory run first.
  void run_eagerly() {
    // Stops the trace, because its template would contain the results of later ops as constants.
    CellTrace::break_off("it runs an op in batch(enabled=False)", info_.name);
    left_to_eager_ = true;
    if (scope_.graph().has_stale()) finish_updates(scope_, info_.name, arguments());
    const Scan s = scan(info_, scope_.graph(), arguments());
    if (info_.action_on(arguments()) == Action::kMutate) return mutate(s);
    s.pending ? at_once(kEager) : run_as_it_is();
  }

 private:
  at::ArrayRef<c10::IValue> arguments() const { return torch::jit::last(*stack_, num_arguments()); }
  size_t num_arguments() const { return info_.num_arguments; }

  // Whether the caller runs below autograd, like torch::tensor({1, 2}).
  static bool is_filling_in_data() {
    const CaptureState& state = CaptureState::current();
    // The factories in namespace torch and the factories of Python also exclude ADInplaceOrView.
    return state.is_below_autograd() &&
           !state.keys->excluded().has(c10::DispatchKey::ADInplaceOrView);
  }

  static bool is_captured(const Scan& s) { return s.plain && (s.pending || s.is_recorded); }

  // Decides how the call is handled. The table of actions is in op_registry.cpp.
  Action decide(const Scan& s) const {
    const Action action = info_.action_on(arguments());
    if (action == Action::kMutate) return Action::kMutate;
    const bool sees_conjugate = info_.sees_conjugate && is_conjugated(arguments()[0].toTensor());
    if (left_to_eager_ || sees_conjugate) return Action::kAtOnce;
    if (!s.plain) return is_sparse_product(s) ? Action::kDecompose : Action::kAtOnce;
    if (action == Action::kFactory && is_filling_in_data()) return Action::kAtOnce;
    if (s.pending && action == Action::kAtOnce) {
      return decomposition_of(info_, arguments()) != nullptr ? Action::kDecompose : action;
    }
    if (s.pending || action == Action::kFactory) return action;
    const bool captures_data = CaptureState::current().captures_data;
    const bool recorded = is_captured(s) || captures_data;
    switch (action) {
      case Action::kDefer:
        return recorded || s.weight || info_.always_defer ? Action::kDefer : Action::kAtOnce;
      case Action::kView:  // without grad mode, the view of a parameter is a leaf
        if (!captures_data && !grad_mode()) return Action::kAtOnce;
        return recorded && !makes_constant(info_, arguments()) ? action : Action::kAtOnce;
      case Action::kDecompose:
        return recorded || info_.always_defer ? action : Action::kAtOnce;
      default:
        return Action::kAtOnce;
    }
  }

  // --- autocast (autocast.h) ---

  bool is_cast_by_autocast() const {
    const DispatchContext context = DispatchContext::current();
    return info_.casts(context) || (info_.may_cast_within(context) && info_.decomposes);
  }

  void run_autocast() {
    // A template would not contain the casts that autocast finds in its own cache.
    CellTrace::break_off("autocast casts its tensors", info_.name);
    const CastingGuard casting;
    named([this] { run_composite(); });
  }

  // Casts an ordinary tensor, usually a weight, once, so that all instances share the same cast.
  void cast_once() {
    const at::Tensor tensor = arguments()[0].toTensor();
    const c10::ScalarType to = arguments()[1].toScalarType();
    const at::Tensor known = scope_.casts().find(tensor, to);
    if (known.defined()) return give({known}, false);
    run_as_it_is();
    scope_.casts().add(tensor, to, torch::jit::peek(*stack_, 0, 1).toTensor());
  }

  // --- deferring ---

  // Converts masks with known values to indices. If an index is wrong, eager raises the error.
  void look_at_indices() {
    const Scan s = scan(info_, scope_.graph(), arguments());
    if (!is_captured(s)) return;
    left_to_eager_ = !prepare_indices(scope_, info_, stack_);
  }

  // Captures the call in the same way as the earlier call with an equal key. Returns false if no
  // call has this key.
  bool try_cached_call() {
    if (left_to_eager_ || !may_use_call_cache(scope_) || !can_be_cached(info_, arguments()))
      return false;
    CallKey key(info_, scope_.graph(), DispatchContext::current());
    for (const c10::IValue& argument : arguments()) key.add(argument);
    Recorded recorded;
    if (!autobatch::try_cached_call(scope_, info_, key, recorded)) return false;
    give(recorded.tensors, recorded.list);
    return true;
  }

  // Captures the call as a node. Returns false if that is not possible.
  bool defer() {
    settle(scope_, arguments());
    Recorded recorded;
    std::optional<CachedCall> cached;
    constexpr bool kMayDecompose = true;
    if (!record_call(scope_, info_, arguments(), recorded, &cached, kMayDecompose)) return false;
    if (cached.has_value()) {
      remember(*std::move(cached), recorded);
    } else if (recorded.tensors.size() != 1 || !is_argument(recorded.tensors[0])) {
      CellTrace::break_off("it makes a call that cannot be replayed", info_.name);
    }
    give(recorded.tensors, recorded.list);
    return true;
  }

  // Whether the call multiplies by a sparse matrix and has a decomposition.
  bool is_sparse_product(const Scan& s) const {
    return (s.pending || s.is_recorded) && s.sparse && !is_cast_by_autocast() &&
           decomposition_of(info_, arguments()) != nullptr;
  }

  bool is_argument(const at::Tensor& result) const {
    return std::ranges::any_of(arguments(), [&](const c10::IValue& argument) {
      return argument.isTensor() && argument.toTensor().is_same(result);
    });
  }

  // Caches how the call was captured, for later calls with an equal key. Must be called after the
  // capture, which determines the weights.
  void remember(CachedCall cached, const Recorded& recorded) {
    if (!may_use_call_cache(scope_)) return;
    CallKey key(info_, scope_.graph(), DispatchContext::current());
    for (const c10::IValue& argument : arguments()) key.add(argument);
    // If the tensor object of an operand is not in the graph, the operand was replaced by a weight
    // with the same memory. The key does not identify this weight.
    const auto is_known = [&](uint32_t i) { return i == kNone || key.tensors()[i].id != kNone; };
    const bool known = cached.signature == nullptr
                           ? is_known(0)
                           : std::all_of(cached.operands.begin(), cached.operands.end(), is_known);
    if (!key.valid() || !known) {
      return CellTrace::break_off("it makes a call that cannot be replayed", info_.name);
    }
    if (CellTrace* trace = CellTrace::current()) trace->add(info_, key, cached, recorded.tensors);
    if (can_be_cached(info_, arguments())) scope_.tables().calls.add(key, std::move(cached));
  }

  void give(at::ArrayRef<at::Tensor> results, bool list) {
    torch::jit::drop(*stack_, num_arguments());
    if (list) return void(stack_->emplace_back(c10::List<at::Tensor>(results)));
    for (const at::Tensor& result : results) stack_->emplace_back(result);
  }

  // --- views ---

  bool view() {
    const at::Tensor& self = torch::jit::peek(*stack_, 0, num_arguments()).toTensor();
    if (!self.defined()) return false;
    ViewResult result;
    infer_views(info_, arguments(), result);
    if (result.outcome == ViewOutcome::kAsk) return false;
    if (result.outcome == ViewOutcome::kCopy) {
      // Makes a row-major copy, as eager's reshape does. Autograd does not treat the copy as the
      // base of a view.
      const at::Tensor copy = self.clone(at::MemoryFormat::Contiguous);
      give({at::_unsafe_view(copy, result.views[0].sizes)}, false);
      return true;
    }
    return add_views(self, result);
  }

  bool add_views(const at::Tensor& self, const ViewResult& result) {
    CachedCall cached;
    cached.list = result.list;
    for (const ViewGeometry& v : result.views) {
      cached.views.push_back({scope_.graph().geometries().intern(v.sizes, v.strides),
                              v.offset - self.unsafeGetTensorImpl()->storage_offset()});
    }
    const bool depends_on_geometry =
        infer_element_maps(info_, arguments(), scope_.graph(), cached.views);
    Recorded recorded;
    if (!record_views(scope_, info_, self, cached.views, cached.list, recorded)) return false;
    if (Verifier* verifier = scope_.verifier()) {
      c10::SmallVector<ValueId, 4> ids;
      for (const at::Tensor& view : recorded.tensors) ids.push_back(as_pending(view)->value());
      // The verifier is not told about views of written memory. A view of written memory stands for
      // the written value, and the verifier finds this value by itself.
      if (!ids.empty() && scope_.graph().memory_of(scope_.graph().value(ids[0]).base) == nullptr) {
        verifier->note(scope_.graph(), info_, arguments(), ids);
      }
    }
    // View ops without address arithmetic may use absolute offsets, like as_strided.
    const bool is_absolute = info_.view == nullptr || info_.name == "aten::as_strided";
    !is_absolute&& depends_on_geometry
        ? remember(std::move(cached), recorded)
        : CellTrace::break_off("it makes a view that cannot be replayed", info_.name);
    give(recorded.tensors, recorded.list);
    return true;
  }

  // --- factories, writes and eager calls ---

  void factory() {
    if (defer()) return;
    CellTrace::break_off("it creates a tensor", info_.name);
    for (size_t i = 0; i < num_arguments(); ++i) {
      c10::IValue& value = torch::jit::peek(*stack_, i, num_arguments());
      if (!value.isTensor() || as_pending(value.toTensor()) == nullptr) continue;
      const at::Tensor& tensor = value.toTensor();
      const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
      value = at::empty_strided(tensor.sizes(), tensor.strides(),
                                tensor.options().requires_grad(false));
    }
    run_now_recomputed();
  }

  void mutate(const Scan& s) {
    CellTrace::break_off("it writes to a tensor", info_.name);
    settle_written_checks();
    const auto waits = [this](const at::Tensor& to) { return await_readers(scope_, to); };
    if (any_written(waits)) return info_.handle.callBoxed(stack_);  // dispatch keys may differ now
    if (flush_shared_memory(scope_, info_, arguments())) return at_once("writes to its arguments");
    const bool may_defer = s.plain && !left_to_eager_;
    if (may_defer && s.pending && run_out_variant(info_, *stack_)) return;
    if (may_defer &&
        (record_write(scope_, info_, arguments()) || record_update(scope_, info_, arguments()))) {
      return give({arguments()[0].toTensor()}, false);
    }
    if (at::Tensor result; !left_to_eager_ && info_.keeps_statistics && is_captured(s) &&
                           record_batch_norm(scope_, info_, arguments(), result)) {
      return give({result}, false);
    }
    if (scope_.graph().has_stale()) finish_updates(scope_, info_.name, arguments());
    if (is_captured(s) && writes_in_parts(info_) && !left_to_eager_) {
      return named([this] { run_composite(); });
    }
    const ClaimsHeld claims = claim_written(scope_, info_, arguments());
    note_at_once("writes to its arguments");
    make_real(info_, arguments(), ": ", "writes to its arguments");
    const auto is_read = [&](const at::Tensor& to) { return scope_.graph().reads_storage_of(to); };
    if (any_written(is_read)) scope_.flush(info_.name + " writes to memory that pending ops read");
    for_each_written(info_, arguments(), [&](const at::Tensor& to) {
      if (as_pending(to) == nullptr) scope_.before_write(to);
    });
    at_once("writes to its arguments");
    if (info_.name.starts_with("aten::set_") && torch::jit::peek(*stack_, 0, 1).isTensor()) {
      note_alias(torch::jit::peek(*stack_, 0, 1).toTensor());
    }
  }

  template <class Is>
  bool any_written(const Is& is) const {
    bool any = false;
    for_each_written(info_, arguments(),
                     [&](const at::Tensor& tensor) { any = any || is(tensor); });
    return any;
  }

  // Settles the deferred checks of values that the call writes to, because such checks need the
  // values from before the write.
  void settle_written_checks() {
    const auto is_checked = [this](const at::Tensor& tensor) { return scope_.is_checked(tensor); };
    if (scope_.checks().any_waiting() && any_written(is_checked)) {
      scope_.settle_checks(info_.name + " writes to a value that a check waits for");
    }
  }

  // Adds the call to the report, if it causes a flush.
  void note_at_once(const char* reason) {
    if (needs_flush(scope_, arguments())) scope_.note_at_once(info_.name, reason);
  }

  // Runs an op that returns one truth value (OpInfo::is_verdict) on the result of a factory,
  // without a flush. For example, torch.distributions checks whether a matrix is square.
  void run_on_constant() {
    CellTrace::break_off("it reads the value of a constant tensor", info_.name);
    make_real(info_, arguments(), ": ", kNeedsValues);
    run_now_recomputed();
  }

  void at_once(const char* reason) {
    if (reason == kNeedsValues) CellTrace::note_read(info_.name);
    if (!makes_constant(info_, arguments())) {
      CellTrace::break_off("it calls an op that is not captured", info_.name);
    }
    if (!left_to_eager_ && put_known_values(scope_, info_, stack_)) {
      return named([this] { run_now_recomputed(); });
    }
    note_at_once(reason);
    make_real(info_, arguments(), ": ", reason);
    named([this] { run_now_recomputed(); });
  }

  // Calls `visit`, and adds a description of the op's call to the message of any error.
  template <class Visit>
  void named(const Visit& visit) {
    const auto given = arguments();  // `visit` may pop the arguments, so they are copied
    const c10::SmallVector<c10::IValue, 8> kept(given.begin(), given.end());
    try {
      visit();
    } catch (c10::Error& error) {
      error.add_context("while running " + describe_call(info_, kept) +
                        " inside torch_autobatch.batch()");
      throw;
    }
  }

  void run_decomposition(const Decomposition& decomposition) {
    lock_.release();
    give(decomposition.run(info_, arguments()), false);
  }

  // Runs the composite kernel on the pending tensors. The ops that it calls are captured.
  void run_composite() {
    // `.tolist()` calls resolve_conj, and then reads the memory without dispatching an op.
    if (CellTrace::current() != nullptr && info_.name == "aten::resolve_conj" &&
        as_pending(arguments()[0].toTensor()) == nullptr) {
      CellTrace::break_off("it may read a value", info_.name);
    }
    lock_.release();
    info_.handle.redispatchBoxed(keys_ & kBelowCapture, stack_);
  }

  // Runs the call as if no scope were open. Pending arguments stay pending.
  void run_as_it_is() {
    lock_.release();
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    info_.handle.redispatchBoxed(keys_ & kBelowCapture, stack_);
  }

  // Runs the call after its arguments have become real. The dispatch keys of the arguments have
  // changed, so the call is dispatched again.
  void run_now_recomputed() {
    lock_.release();
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    info_.handle.callBoxed(stack_);
  }

  Scope::Lock lock_;  // released before the op itself runs
  Scope& scope_;
  const OpInfo& info_;
  c10::DispatchKeySet keys_;
  Stack* stack_;
  bool left_to_eager_ = false;  // eager will raise an error, or the program may catch one
};

}  // namespace

// Returns the PyTorch feature that prevents capture of the op, if any, and adds it to the report.
static const Watcher* note_watcher(const OpInfo& info) {
  constexpr const char* kReason = "this PyTorch feature must observe each op when the op runs";
  const CaptureState& state = CaptureState::current();
  const Watcher* found = state.scope == nullptr ? nullptr : watcher(state);
  if (found != nullptr && !state.eager && info.action != Action::kMetadata) {
    state.scope->note_at_once(found->ops, kReason);
  }
  return found;
}

void capture_as(const OpInfo& info, c10::DispatchKeySet keys, Stack* stack) {
  const CaptureState& state = CaptureState::current();
  if (may_pass(state) && is_captured_for_tensors(info) &&
      !has_capture_reasons(state, torch::jit::last(*stack, info.num_arguments))) {
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    return info.handle.redispatchBoxed(keys & kBelowCapture, stack);
  }
  if (Scope* scope = capturing_scope(state)) {
    Call(*scope, info, keys, stack).run();
    return;
  }
  if (Scope* scope = eager_scope(state)) return Call(*scope, info, keys, stack).run_eagerly();
  if (FormulaTrace* formula = CaptureState::current().formula) {
    return formula->run(info, keys, stack);
  }
  CellTrace::break_off("it calls an op that is not captured", info.name);
  if (Scope* scope = Scope::current(); scope != nullptr && scope->graph().has_stale()) {
    finish_updates(*scope, info.name, torch::jit::last(*stack, info.num_arguments));
  }
  const Watcher* seen_by = note_watcher(info);
  make_real(info, torch::jit::last(*stack, info.num_arguments), seen_by != nullptr ? " under " : "",
            seen_by != nullptr ? seen_by->name.c_str() : " outside the block");
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  info.handle.callBoxed(stack);
}

}  // namespace autobatch

#include "autobatch/capture/node_builder.h"

#include "autobatch/capture/shape_inference.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/debug/verify.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/scope/scope.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>
#include <sstream>

namespace autobatch {
namespace {

using Arguments = at::ArrayRef<c10::IValue>;

bool is_random(const OpInfo& op, Arguments arguments) {
  if (!op.random || op.dropout_argument < 0) return op.random;
  return arguments[static_cast<size_t>(op.dropout_argument)].toDouble() != 0;
}

void fill(Signature& signature, const Draft& draft, const Rule& rule) {
  signature.op = &draft.op();
  signature.rule = &rule;
  signature.context = draft.context();
  signature.slots.assign(draft.slots().begin(), draft.slots().end());
  signature.variadic = draft.variadic_argument();
  signature.weight_slots = draft.weight_slots();
  for (size_t i = 0; i < draft.num_arguments(); ++i) {
    bool has_tensor = false;
    for_each_tensor(draft.argument(i), [&](const at::Tensor&) { has_tensor = true; });
    const bool drop = has_tensor && !draft.is_constant(i);
    signature.arguments.push_back(drop ? c10::IValue() : draft.argument(i));
  }
}

// The signature of the draft, new or known; null if its results can't be told.
Signature* intern(Scope& scope, Draft& draft, const Rule& rule) {
  SignatureTable& table = scope.tables().signatures;
  Signature* signature = table.find(draft.key());
  if (signature == nullptr) {
    std::vector<ResultMeta> results;
    bool list = false;
    if (rule.infers()) {
      ++scope.report().inferred;
      if (!infer_results(draft, results, list)) return nullptr;
      for (const ResultMeta& r : results) {
        if (rule.geometry_of(draft, r.geometry) != r.geometry) return nullptr;
      }
    }
    signature = table.add(draft.key());
    fill(*signature, draft, rule);
    signature->results = std::move(results);
    signature->returns_list = list;
  }
  return signature;
}

void add_node(Scope& scope, Signature* signature, at::ArrayRef<ValueId> operands,
              at::ArrayRef<ResultMeta> results, size_t visible,
              c10::SmallVectorImpl<ValueId>& ids) {
  if (signature->scope != scope.id()) {
    signature->scope = scope.id();
    signature->site = current_site();
  }
  Graph& graph = scope.graph();
  const NodeId node = graph.add_node(signature, operands);
  for (size_t k = 0; k < results.size(); ++k) {
    const ResultMeta& r = results[k];
    const ValueId id = graph.add_result(node, r.geometry, r.dtype, r.device, r.requires_grad);
    if (k < visible) ids.push_back(id);
  }
  ++scope.report().ops;
}

// Of what has no gradient eager does not ask where one would go.
void ask_gradients(Graph& graph, at::ArrayRef<ValueId> operands, at::ArrayRef<ResultMeta> results) {
  const bool records = std::any_of(results.begin(), results.end(),
                                   [](const ResultMeta& r) { return r.requires_grad; });
  for (size_t slot = 0; slot < operands.size() && records; ++slot) {
    if (operands[slot] != kNone) graph.need_gradient(operands[slot]);
  }
}

// The call's tensors that the graph has not seen, in the order in which the key counts on that, and
// what ask_gradients asks.
void meet_outside(Graph& graph, CallKey& key, const Recipe& recipe) {
  const bool records = std::any_of(recipe.results.begin(), recipe.results.end(),
                                   [](const ResultMeta& r) { return r.requires_grad; });
  for (CallKey::Operand& operand : key.tensors()) {
    if (operand.id == kNone) {
      operand.id = graph.value_of(
          at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(operand.tensor)),
          operand.is_weight);
    }
    if (operand.asks && records) graph.need_gradient(operand.id);
  }
}

// A tensor that is detached from a detached one is none of its views: it is one of what that was
// detached from, which `parent` is set to. False if that is not in the graph.
bool leave_detached(const Graph& graph, ValueId& parent) {
  while (graph.value(parent).kind >= ViewKind::kDetached) {
    parent = graph.value(parent).parent;
    if (parent == kNone) return false;
  }
  return true;
}

bool add_views(Scope& scope, const OpInfo& op, ValueId parent, bool of_gradient,
               at::ArrayRef<Recipe::View> views, bool list, bool records,
               c10::SmallVectorImpl<ValueId>& ids) {
  Graph& graph = scope.graph();
  const bool requires_grad = !op.cuts_gradient && of_gradient && records;
  const ViewKind kind = op.cuts_gradient           ? ViewKind::kDetached
                        : !records                 ? ViewKind::kNoGrad
                        : list && !op.unsafe_split ? ViewKind::kOneOfSeveral
                                                   : ViewKind::kPlain;
  // The copy of an outside tensor need not have its strides: eager makes the view.
  const Value base = graph.value(parent);
  if (base.is_outside() && graph.tape().outside[base.index].is_copy) return false;
  if (op.cuts_gradient) {
    // What is detached once more shares the version counter of what was so before.
    if (base.kind == ViewKind::kData || !leave_detached(graph, parent)) return false;
  } else if (base.kind >= ViewKind::kDetached && base.is_outside()) {
    return false;  // a detached tensor is the base of its views: it must be there before them
  }
  // Eager's view is a leaf that requires grad, of which no graph of ours knows.
  if (kind == ViewKind::kNoGrad && of_gradient) return false;
  if (requires_grad) graph.need_gradient(parent);
  for (const Recipe::View& v : views) {
    // From the start of what is the base now, which a split may have changed.
    ids.push_back(graph.add_view(parent, v.geometry, base.offset + v.offset, requires_grad, kind));
    if (v.aparts.empty()) continue;
    Aparts aparts = v.aparts;
    for (Apart& apart : aparts) apart.of = apart.of == kNone ? parent : apart.of;
    graph.note_aparts(ids.back(), std::move(aparts));
  }
  // Of a composite one that is not known (`tensor_split`) each is the result of a node of its own.
  const bool one_node = list && (op.view != nullptr || !op.composite);
  if (one_node || op.unsafe_split) graph.note_siblings(ids);
  scope.report().views += views.size();
  return true;
}

// Which of the call's tensors, as CallKey counts them, stands at `slot`; kNone if none does.
uint32_t tensor_number(Arguments arguments, const Slot& slot) {
  uint32_t number = 0;
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    uint32_t found = kNone;
    const auto count = [&](const at::Tensor& tensor, uint32_t element) {
      if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
      if (i == slot.argument && element == slot.element) found = number;
      ++number;
    };
    if (arguments[i].isTensor()) {
      count(arguments[i].toTensor(), kNone);
    } else if (arguments[i].isList() && !arguments[i].isIntList()) {
      const auto list = arguments[i].toListRef();
      for (uint32_t e = 0; e < list.size(); ++e) {
        if (list[e].isTensor()) count(list[e].toTensor(), e);
      }
    }
    if (found != kNone) return found;
  }
  return kNone;
}

std::optional<Recipe> recipe_of(const Draft& draft, Signature* signature,
                                at::ArrayRef<ResultMeta> results, size_t visible) {
  if (!draft.is_memorable()) return std::nullopt;
  Recipe recipe;
  recipe.signature = signature;
  for (const Slot& source : draft.sources()) {
    recipe.operands.push_back(source.argument == kNone ? kNone
                                                       : tensor_number(draft.arguments(), source));
    if (source.argument != kNone && recipe.operands.back() == kNone) return std::nullopt;
  }
  recipe.results.append(results.begin(), results.end());
  recipe.visible = visible;
  return recipe;
}

}  // namespace

at::Tensor data_view(Graph& graph, const PendingTensor& tensor) {
  ValueId parent = tensor.value();
  const Value value = graph.value(parent);
  const Value& base = graph.value(value.base);
  const bool is_copy = base.is_outside() && graph.tape().outside[base.index].is_copy;
  if (is_copy || !leave_detached(graph, parent)) return {};
  return make_pending(graph, graph.add_view(parent, value.geometry, value.offset,
                                            /*requires_grad=*/false, ViewKind::kData));
}

std::string describe_call(const OpInfo& op, Arguments arguments) {
  std::ostringstream out;
  out << op.name << "(";
  const char* separator = "";
  for (const c10::IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      out << separator << c10::toString(tensor.scalar_type());
      if (tensor.layout() == c10::kStrided) out << tensor.sizes();
      separator = ", ";
    });
  }
  out << ")";
  return out.str();
}

bool record_by(Scope& scope, const OpInfo& op, Arguments arguments, const Rule& rule,
               const DispatchContext& context, Recorded& recorded, bool* left_to_eager,
               std::optional<Recipe>* recipe) {
  Draft draft(op, scope.graph(), arguments, context);
  draft.key(reinterpret_cast<uint64_t>(&rule));
  if (!rule.capture(draft) || !draft.deferrable()) {
    if (left_to_eager != nullptr) *left_to_eager = draft.left_to_eager();
    return false;
  }
  if (draft.returned_argument() != kNone) {
    recorded.tensors.push_back(arguments[draft.returned_argument()].toTensor());
    return true;
  }
  Signature* signature = intern(scope, draft, rule);
  if (signature == nullptr) return false;
  const bool inferred = signature->rule->infers();
  c10::SmallVector<ResultMeta, 4> results = draft.results();
  if (inferred) {
    results.assign(signature->results.begin(), signature->results.end());
    for (ResultMeta& r : results) r.geometry = rule.geometry_of(draft, r.geometry);
  }
  const size_t visible = inferred ? results.size() : draft.num_visible();
  c10::SmallVector<ValueId, 8> ids;
  ask_gradients(scope.graph(), draft.operands(), results);
  add_node(scope, signature, draft.operands(), results, visible, ids);
  for (const ValueId id : ids) recorded.tensors.push_back(make_pending(scope.graph(), id));
  recorded.list = signature->returns_list;
  if (recipe != nullptr) *recipe = recipe_of(draft, signature, results, visible);
  if (Verifier* verifier = scope.verifier()) {
    verifier->note(scope.graph(), draft.op(), draft.arguments(), ids);
  }
  return true;
}

bool record_views(Scope& scope, const OpInfo& op, const at::Tensor& self,
                  at::ArrayRef<Recipe::View> views, bool list, Recorded& recorded) {
  const PendingTensor* pending = as_pending(self);
  // A view looks at the memory, whatever stands there.
  const ValueId parent = pending != nullptr ? pending->value() : scope.graph().value_of(self);
  c10::SmallVector<ValueId, 8> ids;
  if (!add_views(scope, op, parent, self.requires_grad(), views, list, records(), ids)) {
    return false;
  }
  for (const ValueId id : ids) recorded.tensors.push_back(make_pending(scope.graph(), id));
  recorded.list = list;
  return true;
}

bool apply_recipe(Scope& scope, const OpInfo& op, const Recipe& recipe,
                  at::ArrayRef<ValueId> tensors, bool records,
                  c10::SmallVectorImpl<ValueId>& results) {
  Graph& graph = scope.graph();
  if (recipe.signature == nullptr) {
    const auto& aparts = graph.tape().aparts;  // these depend on more than the key says
    if (!aparts.empty() && aparts.count(tensors[0]) != 0) return false;
    const bool requires_grad = graph.value(tensors[0]).requires_grad;
    return add_views(scope, op, tensors[0], requires_grad, recipe.views, recipe.list, records,
                     results);
  }
  c10::SmallVector<ValueId, 8> operands;
  for (const uint32_t i : recipe.operands) operands.push_back(i == kNone ? kNone : tensors[i]);
  ask_gradients(graph, operands, recipe.results);
  add_node(scope, recipe.signature, operands, recipe.results, recipe.visible, results);
  return true;
}

void apply_node(Scope& scope, const Recipe& recipe, at::ArrayRef<ValueId> operands, uint64_t asks,
                c10::SmallVectorImpl<ValueId>& results) {
  for (; asks != 0; asks &= asks - 1) {
    scope.graph().need_gradient(operands[static_cast<size_t>(std::countr_zero(asks))]);
  }
  add_node(scope, recipe.signature, operands, recipe.results, recipe.visible, results);
}

const Recipe* record_known(Scope& scope, const OpInfo& op, CallKey& key,
                           c10::SmallVectorImpl<ValueId>& results) {
  const Recipe* recipe = scope.tables().memo.find(key);
  if (recipe == nullptr) return nullptr;
  if (key.any_outside()) meet_outside(scope.graph(), key, *recipe);
  const auto& tensors = key.tensors();
  if (recipe->signature == nullptr) {
    const bool added = apply_recipe(scope, op, *recipe, tensors[0].id, key.records(), results);
    return added ? recipe : nullptr;
  }
  c10::SmallVector<ValueId, 8> operands;
  for (const uint32_t i : recipe->operands) operands.push_back(i == kNone ? kNone : tensors[i].id);
  add_node(scope, recipe->signature, operands, recipe->results, recipe->visible, results);
  return recipe;
}

bool records() { return CaptureState::current().records(); }

bool record_call(Scope& scope, const OpInfo& op, Arguments arguments, Recorded& recorded,
                 std::optional<Recipe>* recipe) {
  const DispatchContext context = DispatchContext::current();
  if (!op.casts(context) && !op.may_cast_within(context)) {
    // Native rules call kernels below autocast: it makes no difference to these ops.
    DispatchContext plain = context;
    plain.autocast_cpu = plain.autocast_cuda = false;
    for (const Rule* rule : op.rules) {
      bool left_to_eager = false;
      if (record_by(scope, op, arguments, *rule, plain, recorded, &left_to_eager, recipe)) {
        return true;
      }
      if (left_to_eager) return false;
    }
  }
  const Rule& generic = generic_rule(op, is_random(op, arguments));
  return record_by(scope, op, arguments, generic, context, recorded, nullptr, recipe);
}

}  // namespace autobatch

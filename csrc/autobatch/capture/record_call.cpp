#include "autobatch/capture/record_call.h"

#include "autobatch/capture/shape_inference.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/debug/verify.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/graph/view_roots.h"
#include "autobatch/rules/decompositions.h"
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

void fill(Signature& signature, const NodeBuilder& builder, const Rule& rule) {
  signature.op = &builder.op();
  signature.rule = &rule;
  signature.context = builder.context();
  signature.slots.assign(builder.slots().begin(), builder.slots().end());
  signature.variadic = builder.variadic_argument();
  signature.weight_slots = builder.weight_slots();
  for (size_t i = 0; i < builder.num_arguments(); ++i) {
    bool has_tensor = false;
    for_each_tensor(builder.argument(i), [&](const at::Tensor&) { has_tensor = true; });
    const bool drop = has_tensor && !builder.is_constant(i);
    signature.arguments.push_back(drop ? c10::IValue() : builder.argument(i));
  }
}

// Returns the signature of the builder. If the table has no such signature, adds a new one. Returns
// null if the metadata of the results cannot be inferred.
Signature* intern(Scope& scope, NodeBuilder& builder, const Rule& rule) {
  SignatureTable& table = scope.tables().signatures;
  Signature* signature = table.find(builder.key());
  if (signature == nullptr) {
    std::vector<ResultMeta> results;
    bool list = false;
    if (rule.infers()) {
      ++scope.report().inferred;
      if (!infer_results(builder, results, list)) return nullptr;
      for (const ResultMeta& r : results) {
        if (rule.geometry_of(builder, r.geometry) != r.geometry) return nullptr;
      }
    }
    signature = table.add(builder.key());
    fill(*signature, builder, rule);
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
    auto [site, position] = current_place();
    signature->site = std::move(site);
    signature->position = position;
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

// Requests the gradient edges of the operands if a result requires grad. If no result requires
// grad, eager does not need the edges either.
void ask_gradients(Graph& graph, at::ArrayRef<ValueId> operands, at::ArrayRef<ResultMeta> results) {
  const bool needs_grad = std::any_of(results.begin(), results.end(),
                                      [](const ResultMeta& r) { return r.requires_grad; });
  for (size_t slot = 0; slot < operands.size() && needs_grad; ++slot) {
    if (operands[slot] != kNone) graph.need_gradient(operands[slot]);
  }
}

// Adds the call's new tensors to the graph, in the order that the key assumes, and requests
// their gradient edges, like ask_gradients().
void meet_graph_input(Graph& graph, CallKey& key, const CachedCall& cached) {
  const bool needs_grad = std::any_of(cached.results.begin(), cached.results.end(),
                                      [](const ResultMeta& r) { return r.requires_grad; });
  for (CallKey::Operand& operand : key.tensors()) {
    if (operand.id == kNone) {
      operand.id = graph.value_of(
          at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(operand.tensor)),
          operand.is_weight);
    }
    if (operand.asks && needs_grad) graph.need_gradient(operand.id);
  }
}

// If `parent` is a detached tensor, sets `parent` to the tensor from which it was detached. For
// example, `x.detach().detach()` is a view of `x`. Returns false if that tensor is not in the
// graph.
bool leave_detached(const Graph& graph, ValueId& parent) {
  while (graph.value(parent).kind >= ViewKind::kDetached) {
    parent = graph.value(parent).parent;
    if (parent == kNone) return false;
  }
  return true;
}

bool add_views(Scope& scope, const OpInfo& op, ValueId parent, bool of_gradient,
               at::ArrayRef<CachedCall::View> views, bool list, bool grad_mode,
               c10::SmallVectorImpl<ValueId>& ids) {
  Graph& graph = scope.graph();
  const bool requires_grad = !op.cuts_gradient && of_gradient && grad_mode;
  const ViewKind kind = op.cuts_gradient           ? ViewKind::kDetached
                        : !grad_mode               ? ViewKind::kNoGrad
                        : list && !op.unsafe_split ? ViewKind::kOneOfSeveral
                                                   : ViewKind::kPlain;
  // The strides of a copy may differ from the strides of the graph input, so eager makes the view.
  const Value base = graph.value(parent);
  if (base.is_graph_input() && graph.tape().graph_inputs[base.index].is_copy) return false;
  if (op.cuts_gradient) {
    // In eager, detaching `x.data` gives a tensor that shares the version counter of `x.data`.
    if (base.kind == ViewKind::kData || !leave_detached(graph, parent)) return false;
  } else if (base.kind >= ViewKind::kDetached && base.is_graph_input()) {
    return false;  // a detached tensor is the base of its views, so it must exist before them
  }
  // In eager, the result has no history and is not a view. The graph cannot represent such a
  // result.
  if (of_gradient && !grad_mode && op.unsafe_split) return false;
  if (requires_grad) graph.need_gradient(parent);
  for (const CachedCall::View& v : views) {
    // The offset is relative to the current base, which a split of the graph may have changed.
    ids.push_back(graph.add_view(parent, v.geometry, base.offset + v.offset, requires_grad, kind));
    if (v.element_maps.empty()) continue;
    ElementMaps element_maps = v.element_maps;
    for (ElementMap& map : element_maps) map.of = map.of == kNone ? parent : map.of;
    graph.set_element_maps(ids.back(), std::move(element_maps));
  }
  // A composite op without a view function (`tensor_split`) gives each view a separate autograd
  // node.
  const bool one_node = list && (op.view != nullptr || !op.composite);
  if (one_node || op.unsafe_split) graph.note_siblings(ids);
  scope.report().views += views.size();
  return true;
}

// Returns the index in CallKey::tensors() of the tensor at `slot`, or kNone if there is no tensor.
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

std::optional<CachedCall> cached_call_of(const NodeBuilder& builder, Signature* signature,
                                         at::ArrayRef<ResultMeta> results, size_t visible) {
  if (!builder.is_cacheable()) return std::nullopt;
  CachedCall cached;
  cached.signature = signature;
  for (const Slot& source : builder.sources()) {
    cached.operands.push_back(
        source.argument == kNone ? kNone : tensor_number(builder.arguments(), source));
    if (source.argument != kNone && cached.operands.back() == kNone) return std::nullopt;
  }
  cached.results.append(results.begin(), results.end());
  cached.visible = visible;
  return cached;
}

}  // namespace

at::Tensor data_view(Graph& graph, const PendingTensor& tensor) {
  ValueId parent = tensor.value();
  const Value value = graph.value(parent);
  const Value& base = graph.value(value.base);
  const bool is_copy = base.is_graph_input() && graph.tape().graph_inputs[base.index].is_copy;
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
               std::optional<CachedCall>* cached) {
  NodeBuilder builder(op, scope.graph(), arguments, context);
  builder.key(reinterpret_cast<uint64_t>(&rule));
  if (!rule.capture(builder) || !builder.deferrable()) {
    if (left_to_eager != nullptr) *left_to_eager = builder.left_to_eager();
    return false;
  }
  if (builder.returned_argument() != kNone) {
    recorded.tensors.push_back(arguments[builder.returned_argument()].toTensor());
    return true;
  }
  Signature* signature = intern(scope, builder, rule);
  if (signature == nullptr) return false;
  const bool inferred = signature->rule->infers();
  c10::SmallVector<ResultMeta, 4> results = builder.results();
  if (inferred) {
    results.assign(signature->results.begin(), signature->results.end());
    for (ResultMeta& r : results) r.geometry = rule.geometry_of(builder, r.geometry);
  }
  const size_t visible = inferred ? results.size() : builder.num_visible();
  c10::SmallVector<ValueId, 8> ids;
  ask_gradients(scope.graph(), builder.operands(), results);
  add_node(scope, signature, builder.operands(), results, visible, ids);
  for (const ValueId id : ids) recorded.tensors.push_back(make_pending(scope.graph(), id));
  recorded.list = signature->returns_list;
  if (cached != nullptr) *cached = cached_call_of(builder, signature, results, visible);
  if (Verifier* verifier = scope.verifier()) {
    verifier->note(scope.graph(), builder.op(), builder.arguments(), ids);
  }
  return true;
}

// Whether the base of the views of this value requires grad. If so, a view that is made under
// no_grad() is a leaf that requires grad in eager.
bool base_requires_grad(const Graph& graph, ValueId id) {
  const Value& root = graph.value(root_of(graph.tape(), id));
  if (!root.is_graph_input()) return graph.requires_grad_now(root.base);
  const at::Tensor& tensor = graph.tape().graph_inputs[root.index].tensor;
  return tensor.is_view() ? tensor._base().requires_grad() : tensor.requires_grad();
}

bool record_views(Scope& scope, const OpInfo& op, const at::Tensor& self,
                  at::ArrayRef<CachedCall::View> views, bool list, Recorded& recorded) {
  const PendingTensor* pending = as_pending(self);
  // A view refers to the memory, and not to the value that was last written to the memory.
  const ValueId parent = pending != nullptr ? pending->value() : scope.graph().value_of(self);
  c10::SmallVector<ValueId, 8> ids;
  const bool of_gradient = self.requires_grad();
  if (!add_views(scope, op, parent, of_gradient, views, list, grad_mode(), ids)) return false;
  const bool are_leaves =
      of_gradient && !grad_mode() && !op.cuts_gradient && base_requires_grad(scope.graph(), parent);
  for (const ValueId id : ids) {
    recorded.tensors.push_back(make_pending(scope.graph(), id));
    if (!are_leaves) continue;
    torch::autograd::impl::materialize_autograd_meta(recorded.tensors.back())->requires_grad_ =
        true;
  }
  recorded.list = list;
  return true;
}

bool apply_cached_call(Scope& scope, const OpInfo& op, const CachedCall& cached,
                       at::ArrayRef<ValueId> tensors, bool grad_mode,
                       c10::SmallVectorImpl<ValueId>& results) {
  Graph& graph = scope.graph();
  if (cached.signature == nullptr) {
    const auto& maps = graph.tape().element_maps;  // element maps depend on more than the key
    if (!maps.empty() && maps.count(tensors[0]) != 0) return false;
    const bool requires_grad = graph.value(tensors[0]).requires_grad;
    if (requires_grad && !grad_mode && !op.cuts_gradient) return false;  // the view may be a leaf
    return add_views(scope, op, tensors[0], requires_grad, cached.views, cached.list, grad_mode,
                     results);
  }
  c10::SmallVector<ValueId, 8> operands;
  for (const uint32_t i : cached.operands) operands.push_back(i == kNone ? kNone : tensors[i]);
  ask_gradients(graph, operands, cached.results);
  add_node(scope, cached.signature, operands, cached.results, cached.visible, results);
  return true;
}

void apply_node(Scope& scope, const CachedCall& cached, at::ArrayRef<ValueId> operands,
                uint64_t asks, c10::SmallVectorImpl<ValueId>& results) {
  for (; asks != 0; asks &= asks - 1) {
    scope.graph().need_gradient(operands[static_cast<size_t>(std::countr_zero(asks))]);
  }
  add_node(scope, cached.signature, operands, cached.results, cached.visible, results);
}

// Whether the cached call has a number that is now passed as a tensor (number_operands.h).
static bool has_varying_number(const Scope& scope, const CachedCall& cached) {
  const VaryingNumbers& numbers = scope.tables().numbers;
  return !numbers.empty() && cached.signature != nullptr && numbers.contains(*cached.signature);
}

const CachedCall* record_known(Scope& scope, const OpInfo& op, CallKey& key,
                               c10::SmallVectorImpl<ValueId>& results) {
  const CachedCall* cached = scope.tables().calls.find(key);
  if (cached == nullptr || has_varying_number(scope, *cached)) return nullptr;
  if (key.any_graph_input()) meet_graph_input(scope.graph(), key, *cached);
  const auto& tensors = key.tensors();
  if (cached->signature == nullptr) {
    const bool added =
        apply_cached_call(scope, op, *cached, tensors[0].id, key.grad_mode(), results);
    return added ? cached : nullptr;
  }
  c10::SmallVector<ValueId, 8> operands;
  for (const uint32_t i : cached->operands) operands.push_back(i == kNone ? kNone : tensors[i].id);
  add_node(scope, cached->signature, operands, cached->results, cached->visible, results);
  return cached;
}

bool grad_mode() { return CaptureState::current().grad_mode(); }

bool record_call(Scope& scope, const OpInfo& op, Arguments arguments, Recorded& recorded,
                 std::optional<CachedCall>* cached, bool may_decompose) {
  const DispatchContext context = DispatchContext::current();
  if (!op.casts(context) && !op.may_cast_within(context)) {
    // Autocast does not affect these ops, because native rules call kernels below autocast.
    DispatchContext plain = context;
    plain.autocast_cpu = plain.autocast_cuda = false;
    for (const Rule* rule : op.rules) {
      bool left_to_eager = false;
      if (record_by(scope, op, arguments, *rule, plain, recorded, &left_to_eager, cached)) {
        return true;
      }
      if (left_to_eager) return false;
    }
  }
  if (may_decompose && decomposition_of(op, arguments) != nullptr) return false;
  const Rule& rule = generic_rule(op, is_random(op, arguments));
  return record_by(scope, op, arguments, rule, context, recorded, nullptr, cached);
}

}  // namespace autobatch

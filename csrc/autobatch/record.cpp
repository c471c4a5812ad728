#include "autobatch/record.h"

#include "autobatch/infer.h"
#include "autobatch/pending_tensor.h"
#include "autobatch/scope.h"
#include "autobatch/verify.h"

#include <torch/csrc/autograd/variable.h>

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
  for (size_t i = 0; i < draft.num_arguments(); ++i) {
    bool has_tensor = false;
    for_each_tensor(draft.argument(i), [&](const at::Tensor&) { has_tensor = true; });
    const bool drop = has_tensor && !draft.is_constant(i);
    signature.arguments.push_back(drop ? c10::IValue() : draft.argument(i));
  }
}

// The signature of the draft, new or known; null if its results can't be told.
Signature* intern(Scope& scope, const Draft& draft, const Rule& rule) {
  SignatureTable& table = scope.tables().signatures;
  Signature* signature = table.find(draft.key());
  if (signature == nullptr) {
    std::vector<ResultMeta> results;
    bool list = false;
    if (rule.infers() && !infer_results(draft, results, list)) return nullptr;
    signature = table.add(draft.key());
    fill(*signature, draft, rule);
    signature->results = std::move(results);
    signature->returns_list = list;
  }
  if (signature->scope != scope.id()) {
    signature->scope = scope.id();
    signature->site = current_site();
  }
  return signature;
}

void add_node(Scope& scope, Signature* signature, const Draft& draft, Recorded& recorded) {
  Graph& graph = scope.graph();
  const NodeId node = graph.add_node(signature, draft.operands());
  const bool inferred = signature->rule->infers();
  at::ArrayRef<ResultMeta> results = draft.results();
  if (inferred) results = signature->results;
  const size_t visible = inferred ? results.size() : draft.num_visible();
  c10::SmallVector<ValueId, 4> ids;
  for (size_t k = 0; k < results.size(); ++k) {
    const ResultMeta& r = results[k];
    const ValueId id = graph.add_result(node, r.geometry, r.dtype, r.device, r.requires_grad);
    if (k >= visible) continue;
    ids.push_back(id);
    recorded.tensors.push_back(make_pending(graph, id));
  }
  recorded.list = signature->returns_list;
  ++scope.report().ops;
  if (Verifier* verifier = scope.verifier())
    verifier->note(graph, draft.op(), draft.arguments(), ids);
}

}  // namespace

at::Tensor make_pending(Graph& graph, ValueId id) {
  auto impl = c10::make_intrusive<PendingTensor>(&graph, id);
  graph.attach(id, impl.get());
  const bool requires_grad = graph.value(id).requires_grad;
  at::Tensor tensor(std::move(impl));
  if (requires_grad) {
    torch::autograd::impl::materialize_autograd_meta(tensor)->requires_grad_ = true;
  }
  return tensor;
}

bool record_by(Scope& scope, const OpInfo& op, Arguments arguments, const Rule& rule,
               const DispatchContext& context, Recorded& recorded, bool* left_to_eager) {
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
  add_node(scope, signature, draft, recorded);
  return true;
}

bool record_call(Scope& scope, const OpInfo& op, Arguments arguments, Recorded& recorded) {
  const DispatchContext context = DispatchContext::current();
  if (!op.casts(context) && !op.may_cast_within(context)) {
    // Native rules call kernels below autocast: it makes no difference to these ops.
    DispatchContext plain = context;
    plain.autocast_cpu = plain.autocast_cuda = false;
    for (const Rule* rule : op.rules) {
      bool left_to_eager = false;
      if (record_by(scope, op, arguments, *rule, plain, recorded, &left_to_eager)) return true;
      if (left_to_eager) return false;
    }
  }
  const Rule& generic = is_random(op, arguments) ? loop_rule() : functorch_rule();
  return record_by(scope, op, arguments, generic, context, recorded);
}

}  // namespace autobatch

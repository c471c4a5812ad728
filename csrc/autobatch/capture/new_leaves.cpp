#include "autobatch/capture/new_leaves.h"

#include "autobatch/capture/arguments.h"
#include "autobatch/capture/record_call.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/rules/factories.h"
#include "autobatch/rules/rule.h"
#include "autobatch/scope/scope.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

namespace autobatch {
namespace {

// Whether the tensor uses its whole memory, and no other tensor uses this memory.
bool owns_memory_alone(Graph& graph, const PendingTensor& tensor) {
  const Value& value = graph.value(tensor.value());
  const Value& base = graph.value(value.base);
  if (base.is_graph_input() || graph.memory_of(value.base) != nullptr) return false;
  if (graph.tape().versions.contains(value.base)) return false;  // the memory was written to
  // The result of `torch.zeros(3, requires_grad=True)` becomes real without a flush.
  if (is_factory(*graph.tape().nodes[base.node].signature)) return false;
  if (reinterpreted_value(graph.tape(), value.base) != kNone || is_shared(graph.tape(), value.base))
    return false;
  if (value.geometry != base.geometry || value.offset != base.offset) return false;
  for (ValueId id = value.base; id != kNone; id = graph.value(id).next_view) {
    const PendingTensor* other = graph.value(id).tensor;
    if (other != nullptr && other != &tensor) return false;
  }
  return value.kind != ViewKind::kData && value.kind != ViewKind::kNoGrad &&
         value.kind != ViewKind::kOneOfSeveral;
}

// Whether the program can notice a gradient after the tensor was destroyed.
bool has_hooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && (!meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr);
}

bool capture_new_leaf(Scope& scope, PendingTensor& tensor) {
  Graph& graph = scope.graph();
  if (CellTrace::current() != nullptr || !owns_memory_alone(graph, tensor)) return false;
  static const OpInfo& op = find_op("autobatch::leaf", "");
  const at::Tensor handle(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&tensor));
  if (has_hooks(handle) || handle.is_inference()) return false;
  const std::vector<c10::IValue> arguments{handle};
  const DispatchContext context = DispatchContext::current();
  Recorded recorded;
  if (!record_by(scope, op, arguments, *op.rules.front(), context, recorded)) return false;
  const ValueId made = as_pending(recorded.tensors.front())->value();
  recorded.tensors.clear();
  graph.move_tensor(tensor.value(), made);
  return true;
}

}  // namespace

bool capture_new_leaves(Scope& scope, at::ArrayRef<c10::IValue> arguments) {
  if (!c10::GradMode::is_enabled()) return false;
  bool all = true;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      PendingTensor* pending = as_pending(tensor);
      if (!all || pending == nullptr || pending->graph() != &scope.graph()) return;
      const bool is_new =
          pending->requires_grad() && !scope.graph().requires_grad_now(pending->value());
      if (is_new) all = capture_new_leaf(scope, *pending);
    });
  }
  return all;
}

}  // namespace autobatch

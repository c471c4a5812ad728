// The functions of pending_tensor.h that need the scope that owns the graph.

#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/factories.h"
#include "autobatch/scope/scope.h"

namespace autobatch {

bool is_result(const PendingTensor& tensor) {
  const Scope* scope = Scope::current();
  const Graph* graph = tensor.graph();
  return scope != nullptr && graph == &scope->graph() && tensor.requires_grad() &&
         graph->requires_grad_now(tensor.value()) && !is_leaf(graph->tape(), tensor.value());
}

void ensure_real(at::ArrayRef<PendingTensor*> tensors, const std::string& reason) {
  for (PendingTensor* tensor : tensors) {
    tensor->check_not_lost();
    if (tensor->is_pending()) compute_owned(tensors, *tensor->graph(), reason);
    tensor->check_not_lost();
  }
}

void ensure_real(const at::TensorBase& tensor, const std::string& reason) {
  if (PendingTensor* pending = as_pending(tensor)) ensure_real({pending}, reason);
}

}  // namespace autobatch

#include "autobatch/execute/leaf_edges.h"

#include "autobatch/rules/factories.h"

#include <torch/csrc/autograd/variable.h>

namespace autobatch {

bool is_recorded(const FlushRecord& record, const PendingTensor& tensor) {
  return tensor.requires_grad() && record.tape.values[tensor.value()].requires_grad;
}

bool is_new_leaf(const FlushRecord& record, const PendingTensor& tensor) {
  return is_recorded(record, tensor) && is_leaf(record.tape, tensor.value());
}

std::vector<torch::autograd::Edge> leaf_edges(const FlushRecord& record,
                                              const std::vector<PendingTensor*>& computed) {
  std::vector<torch::autograd::Edge> edges;
  for (PendingTensor* tensor : computed) {
    if (!is_recorded(record, *tensor)) continue;
    torch::autograd::Edge& edge = edges.emplace_back();
    if (!is_new_leaf(record, *tensor)) continue;
    const at::Tensor handle(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensor));
    edge = {torch::autograd::impl::grad_accumulator(handle), 0};
  }
  return edges;
}

}  // namespace autobatch

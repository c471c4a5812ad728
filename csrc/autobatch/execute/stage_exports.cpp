// Fills graph inputs of a graph after a part of the graph was split off and computed. The rest of
// the graph reads the values of the part through these graph inputs.
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/tensor_views.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace autobatch {

void Graph::fill_exports(const Split& split, at::ArrayRef<Computed> exports) {
  std::unordered_map<uint32_t, const Computed*> lost;
  for (size_t i = 0; i < split.exports.size(); ++i) {
    GraphInput& graph_input = tape_.graph_inputs[split.exports[i].graph_input];
    const at::Tensor& tensor = exports[i].tensor;
    if (!tensor.defined()) {
      lost[split.exports[i].graph_input] = &exports[i];
      continue;
    }
    graph_input.tensor = tensor;
    graph_input.data = detached_alias(tensor);
    if (graph_input.is_copy) {
      const Geometry& g = *tape_.values[graph_input.value].geometry;
      graph_input.data =
          at::empty_strided(g.sizes, g.strides, tensor.options()).copy_(graph_input.data);
    }
    if (tensor.requires_grad()) graph_input.edge = torch::autograd::impl::gradient_edge(tensor);
    graph_input_index_[tensor.unsafeGetTensorImpl()] = graph_input.value;
    if (!tensor.unsafeGetTensorImpl()->version_counter().enabled()) continue;
    graph_input.counter = tensor.unsafeGetTensorImpl()->version_counter();
    graph_input.version = graph_input.counter.current_version();
    graph_input.counted = true;
  }
  if (!lost.empty()) lose_readers_of(lost);
}

void Graph::lose_readers_of(const std::unordered_map<uint32_t, const Computed*>& graph_input) {
  std::vector<const Computed*> gone(tape_.nodes.size(), nullptr);
  const auto cause = [&](const Value& value) -> const Computed* {
    if (!value.is_graph_input()) return gone[value.node];
    const auto lost = graph_input.find(value.index);
    return lost == graph_input.end() ? nullptr : lost->second;
  };
  for (NodeId id = 0; id < tape_.nodes.size(); ++id) {
    if (tape_.nodes[id].state != NodeState::kWaiting) continue;
    for (ValueId operand : tape_.operands_of(tape_.nodes[id])) {
      if (operand == kNone || gone[id] != nullptr) continue;
      gone[id] = cause(tape_.values[operand]);
    }
  }
  for (ValueId id = 0; id < tape_.values.size(); ++id) {
    Value& value = tape_.values[id];
    if (value.tensor == nullptr || cause(value) == nullptr) continue;
    std::exchange(value.tensor, nullptr)->lose(cause(value)->lost);
    died_.push_back(id);
  }
}

}  // namespace autobatch

#include "autobatch/execute/function_results.h"

#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace autobatch {
namespace {

bool is_function(const Node& node) {
  const OpInfo* op = node.signature->op;
  return op != nullptr && op->is_function;
}

}  // namespace

std::vector<c10::intrusive_ptr<PendingTensor>> hold_function_results(Graph& graph, Tape& tape,
                                                                     const Store& computed) {
  std::vector<c10::intrusive_ptr<PendingTensor>> made;
  if (std::ranges::none_of(tape.nodes, is_function)) return made;
  for (const Node& reader : tape.nodes) {
    if (reader.state == NodeState::kGone) continue;
    for (const ValueId operand : tape.operands_of(reader)) {
      if (operand == kNone || tape.values[operand].is_graph_input()) continue;
      const ValueId base = tape.values[operand].base;
      Value& value = tape.values[base];
      if (value.tensor != nullptr || !value.requires_grad) continue;
      const Node& node = tape.nodes[value.node];
      if (!is_function(node)) continue;
      const bool is_released = node.state == NodeState::kComputed &&
                               !computed.slabs[computed.places[base].slab].defined();
      if (is_released) continue;
      made.push_back(c10::make_intrusive<PendingTensor>(&graph, base, value));
      value.tensor = made.back().get();
      const at::Tensor handle(made.back());
      torch::autograd::impl::materialize_autograd_meta(handle)->requires_grad_ = true;
    }
  }
  return made;
}

}  // namespace autobatch

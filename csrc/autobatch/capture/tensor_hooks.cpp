#include "autobatch/capture/tensor_hooks.h"

#include "autobatch/capture/capture.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <algorithm>

namespace autobatch {

bool may_capture_hooks(const at::Tensor& tensor) {
  constexpr size_t kMost = 1 << 14;  // operands looked at
  Scope* scope = capturing_scope();
  const PendingTensor& pending = *as_pending(tensor);
  if (scope == nullptr || CellTrace::current() != nullptr) return false;
  const Scope::Lock lock(*scope);
  const Graph& graph = scope->graph();
  // After a read of the block, the tensor becomes real before its hooks.
  if (pending.graph() != &graph || graph.open_record() != nullptr) return false;
  const Tape& tape = graph.tape();
  const ValueId base = pending.value();
  const Value& value = tape.values[base];
  if (value.base != base || value.is_graph_input() || graph.is_written(base)) return false;
  if (graph.is_computed(value.node) || tape.sharers.contains(base)) return false;
  for (ValueId view = value.next_view; view != kNone; view = tape.values[view].next_view) {
    if (tape.values[view].tensor != nullptr) return false;
  }
  const Node& node = tape.nodes[value.node];
  // Eager calls a hook of one of several results also if only other results have a gradient.
  if (node.num_values != 1) return false;
  const size_t first = node.first_operand + node.num_operands;
  if (tape.operands.size() - first > kMost) return false;
  return std::none_of(tape.operands.begin() + static_cast<ptrdiff_t>(first), tape.operands.end(),
                      [&](ValueId id) { return id != kNone && tape.values[id].base == base; });
}

bool replace_value(const at::Tensor& tensor, const at::Tensor& result) {
  const PendingTensor& pending = *as_pending(tensor);
  PendingTensor* of_result = as_pending(result);
  if (of_result == nullptr || !of_result->is_pending()) return false;
  const Scope::Lock lock(*capturing_scope());
  Graph& graph = *pending.graph();
  const ValueId id = of_result->value();
  const PendingTensor::Absence absence(*of_result);
  graph.move_tensor(pending.value(), id);
  return true;
}

}  // namespace autobatch

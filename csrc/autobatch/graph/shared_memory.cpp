#include "autobatch/graph/shared_memory.h"

#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/signature.h"

#include <algorithm>
#include <utility>

namespace autobatch {

void find_sharers(Tape& tape, const Tape& from) {
  if (from.sharers.empty()) return;
  for (const Node& node : tape.nodes) {
    if (!node.signature->op->reinterprets) continue;
    const Value& operand = tape.values[tape.operands[node.first_operand]];
    tape.sharers[operand.base].push_back(node.first_value);
  }
}

bool Tape::is_looked_at(ValueId base) const {
  for (ValueId id = base; id != kNone; id = values[id].next_view) {
    if (values[id].tensor != nullptr) return true;
  }
  return !sharers.empty() && is_shared(*this, base);
}

ValueId reinterpreted_value(const Tape& tape, ValueId base) {
  const NodeId maker = tape.sharers.empty() ? kNone : tape.values[base].node;
  if (maker == kNone || !tape.nodes[maker].signature->op->reinterprets) return kNone;
  return tape.operands[tape.nodes[maker].first_operand];
}

ValueId memory_owner(const Tape& tape, ValueId base) {
  for (ValueId other; (other = reinterpreted_value(tape, base)) != kNone;) {
    base = tape.values[other].base;
  }
  return base;
}

bool is_conjugated(const Tape& tape, ValueId base) {
  const NodeId maker = tape.sharers.empty() ? kNone : tape.values[base].node;
  return maker != kNone && tape.nodes[maker].signature->op->conjugates;
}

bool is_conjugated(const at::Tensor& tensor) {
  const PendingTensor* pending = as_pending(tensor);
  if (pending == nullptr || !pending->is_pending()) return false;
  const Tape& tape = pending->graph()->tape();
  return is_conjugated(tape, tape.values[pending->value()].base);
}

bool shares_memory(const at::Tensor& tensor) {
  const PendingTensor* pending = as_pending(tensor);
  if (pending == nullptr || !pending->is_pending()) return false;
  const Tape& tape = pending->graph()->tape();
  return reinterpreted_value(tape, tape.values[pending->value()].base) != kNone;
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  // For a pending tensor, returns the value that owns its memory, and the real tensor with this
  // memory (or an undefined tensor). For any other tensor, returns kNone and the tensor.
  const auto memory_of = [](const at::Tensor& tensor) {
    const PendingTensor* pending = as_pending(tensor);
    if (pending == nullptr || !pending->is_pending()) return std::pair(kNone, tensor);
    const Tape& tape = pending->graph()->tape();
    const ValueId owner = memory_owner(tape, tape.values[pending->value()].base);
    const Value& value = tape.values[owner];
    const bool is_real = value.is_graph_input() && !tape.graph_inputs[value.index].is_copy;
    return std::pair(owner, is_real ? tape.graph_inputs[value.index].data : at::Tensor());
  };
  const auto [owner_a, real_a] = memory_of(a);
  const auto [owner_b, real_b] = memory_of(b);
  if (owner_a != kNone && owner_a == owner_b) return true;
  return real_a.defined() && real_b.defined() && real_a.is_alias_of(real_b);
}

bool is_shared(const Tape& tape, ValueId base) {
  const auto found = tape.sharers.find(base);
  return found != tape.sharers.end() &&
         std::ranges::any_of(found->second, [&](ValueId id) { return tape.is_looked_at(id); });
}

bool has_shared_memory(const Tape& tape) {
  return std::ranges::any_of(tape.sharers,
                             [&](const auto& of) { return is_shared(tape, of.first); });
}

}  // namespace autobatch

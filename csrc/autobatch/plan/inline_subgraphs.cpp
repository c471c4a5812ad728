// Unfolds subgraphs into their ops before a flush.
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/subgraph/subgraph.h"

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

// Whether the user holds `value`, and `value` is a result of a subgraph from which another result
// of the subgraph is computed. If so, the gradient of the held result must be separate from the
// gradient of the other result.
bool must_unfold(const Tape& tape, const Value& value) {
  if (value.tensor == nullptr || value.is_graph_input() || !value.requires_grad) return false;
  const Subgraph* subgraph = tape.nodes[value.node].signature->rule->subgraph();
  return subgraph != nullptr && subgraph->feeds[tape.values[value.base].index] != 0;
}

// Builds a new tape with the ops of the subgraphs. Values and nodes get new numbers.
class Unfolder {
 public:
  Unfolder(Tape& tape, std::vector<uint8_t> unfolds) : old_(tape), unfolds_(std::move(unfolds)) {}

  Tape run() {
    number_.assign(old_.values.size(), kNone);
    node_before_.assign(old_.nodes.size() + 1, kNone);
    for (ValueId id = 0; id < old_.values.size(); ++id) {
      const Value& value = old_.values[id];
      if (is_left_behind(value)) continue;
      if (value.parent != kNone || value.is_graph_input()) {
        copy_value(id, value.node);
      } else if (id == old_.nodes[value.node].first_value) {
        add_node(value.node);
      }
    }
    NodeId next = static_cast<NodeId>(new_.nodes.size());
    for (size_t id = node_before_.size(); id-- > 0; next = node_before_[id]) {
      if (node_before_[id] == kNone) node_before_[id] = next;
    }
    for (const auto& [content, when] : old_.written_at) {
      new_.written_at[number_[content]] = node_before_[when];
    }
    for (const auto& [content, version] : old_.versions) new_.versions[number_[content]] = version;
    find_sharers(new_, old_);
    new_.graph_inputs = std::move(old_.graph_inputs);
    for (GraphInput& graph_input : new_.graph_inputs)
      graph_input.value = number_[graph_input.value];
    return std::move(new_);
  }

  ValueId number(ValueId old) const { return number_[old]; }
  // Returns the new number of a node that was not unfolded.
  NodeId node_number(NodeId old) const { return node_before_[old]; }

 private:
  // Whether the value belongs to a node that a split has removed (split_graph.cpp). The split
  // turned the results that other nodes read into graph inputs. Nothing reads the remaining results
  // or their views.
  bool is_left_behind(const Value& value) const {
    if (value.is_graph_input()) return false;
    const Node& node = old_.nodes[value.node];
    const auto first = old_.values.begin() + node.first_value;
    return std::any_of(first, first + node.num_values,
                       [](const Value& result) { return result.is_graph_input(); });
  }

  void add_node(NodeId id) {
    const Node& node = old_.nodes[id];
    node_before_[id] = static_cast<NodeId>(new_.nodes.size());
    if (unfolds_[id]) return unfold(node);
    const auto to = static_cast<NodeId>(new_.nodes.size());
    Node copy = node;
    copy.first_operand = static_cast<uint32_t>(new_.operands.size());
    for (ValueId operand : old_.operands_of(node)) {
      new_.operands.push_back(operand == kNone ? kNone : number_[operand]);
    }
    copy.first_value = static_cast<ValueId>(new_.values.size());
    new_.nodes.push_back(copy);
    for (uint32_t k = 0; k < node.num_values; ++k) copy_value(node.first_value + k, to);
  }

  void copy_value(ValueId id, NodeId node) {
    const auto to = static_cast<ValueId>(new_.values.size());
    number_[id] = to;
    Value value = old_.values[id];
    value.next_view = value.uses = kNone;
    if (value.parent == kNone) {
      value.base = to;
      value.node = node;
    } else {
      value.parent = number_[value.parent];
      new_.take_element_maps(to, old_, id, [&](ValueId of) { return number_[of]; });
      hang_on(value, new_.values[value.parent], to);
    }
    new_.values.push_back(value);
    give_tensor(id, to);
  }

  // Makes `value` a view of its parent's base. If the parent is a result of an unfolded subgraph,
  // the base is the result of the inner op.
  void hang_on(Value& value, const Value& parent, ValueId to) {
    value.base = parent.base;
    Value& base = new_.values[value.base];
    value.node = base.node;
    value.index = base.index;
    value.next_view = std::exchange(base.next_view, to);
  }

  void give_tensor(ValueId from, ValueId to) {
    PendingTensor* tensor = old_.values[from].tensor;
    new_.values[to].tensor = tensor;
    if (tensor != nullptr) tensor->stand_for(to);
  }

  void unfold(const Node& cell) {
    const Subgraph& subgraph = *cell.signature->rule->subgraph();
    const Tape& ops = subgraph.ops();
    const auto operands = old_.operands_of(cell);
    const auto first_node = static_cast<NodeId>(new_.nodes.size());
    std::vector<ValueId> inner(ops.values.size(), kNone);
    for (ValueId id = 0; id < ops.values.size(); ++id) {
      const Value& value = ops.values[id];
      if (value.parent != kNone) {
        inner[id] = add_view(value, inner[value.parent], inner[value.base]);
      } else if (value.is_graph_input()) {
        inner[id] = number_[operands[value.index]];
      } else if (id == ops.nodes[value.node].first_value) {
        add_subgraph_node(ops, value.node, first_node, inner);
      }
    }
    for (size_t k = 0; k < subgraph.results.size(); ++k) {
      number_[cell.first_value + k] = inner[subgraph.results[k]];
      give_tensor(cell.first_value + static_cast<ValueId>(k), inner[subgraph.results[k]]);
    }
  }

  ValueId add_view(Value value, ValueId parent, ValueId base) {
    const auto to = static_cast<ValueId>(new_.values.size());
    value.parent = parent;
    value.offset += new_.values[base].offset;  // an operand of the cell may itself be a view
    value.next_view = kNone;
    hang_on(value, new_.values[parent], to);
    new_.values.push_back(value);
    return to;
  }

  void add_subgraph_node(const Tape& subgraph, NodeId id, NodeId first_node,
                         std::vector<ValueId>& inner) {
    Node node = subgraph.nodes[id];
    const auto operands = subgraph.operands_of(node);
    node.first_operand = static_cast<uint32_t>(new_.operands.size());
    for (ValueId operand : operands) {
      new_.operands.push_back(operand == kNone ? kNone : inner[operand]);
    }
    const ValueId first_value = node.first_value;
    node.first_value = static_cast<ValueId>(new_.values.size());
    for (uint32_t k = 0; k < node.num_values; ++k) {
      const auto to = static_cast<ValueId>(new_.values.size());
      Value value = subgraph.values[first_value + k];
      value.node = first_node + id;
      value.base = to;
      value.next_view = kNone;
      inner[first_value + k] = to;
      new_.values.push_back(value);
    }
    new_.nodes.push_back(node);
  }

  Tape& old_;
  std::vector<uint8_t> unfolds_;  // for each old node: whether it is unfolded
  Tape new_;
  std::vector<ValueId> number_;      // for each old value: its new number
  std::vector<NodeId> node_before_;  // for each old node: number of new nodes made before it
};

}  // namespace

bool must_unfold(const Tape& tape, NodeId node) {
  if (tape.nodes[node].signature->rule->subgraph() == nullptr) return false;
  for (uint32_t k = 0; k < tape.nodes[node].num_values; ++k) {
    ValueId id = tape.nodes[node].first_value + k;
    for (; id != kNone; id = tape.values[id].next_view) {
      if (must_unfold(tape, tape.values[id])) return true;
    }
  }
  return false;
}

void unfold_held_subgraphs(Split& split, FlushRecord& record) {
  std::vector<uint8_t> unfolds;
  for (const Value& value : split.tape.values) {
    if (!must_unfold(split.tape, value)) continue;
    unfolds.resize(split.tape.nodes.size(), 0);
    unfolds[value.node] = 1;
  }
  if (unfolds.empty()) return;
  Unfolder unfolder(split.tape, std::move(unfolds));
  split.tape = unfolder.run();
  for (Split::Export& e : split.exports) e.value = unfolder.number(e.value);
  for (NodeId& id : record.order) id = unfolder.node_number(id);
  record.memories.renumber([&](ValueId base) { return unfolder.number(base); });
  PooledVector<Allocation> places(record.store.places.empty() ? 0 : split.tape.values.size());
  for (ValueId id = 0; id < record.store.places.size(); ++id) {
    if (unfolder.number(id) != kNone) places[unfolder.number(id)] = record.store.places[id];
  }
  record.store.places = std::move(places);
}

}  // namespace autobatch

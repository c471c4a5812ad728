#include "autobatch/plan/fuse_shared_input_linear.h"

#include "autobatch/common/switches.h"
#include "autobatch/rules/linear.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace autobatch {
namespace {

Switch fuse_shared_input_linear_switch(Switch::Kind::kPass, "fuse_shared_input_linear");

class SharedInputFuser {
 public:
  SharedInputFuser(Subgraph& subgraph, GeometryTable& geometries)
      : subgraph_(subgraph), tape_(subgraph.tape), geometries_(geometries) {}

  size_t run() {
    find_groups();
    if (groups_.empty()) return 0;
    find_reaching();
    subgraph_.captured = tape_;
    write_tape();
    return groups_.size();
  }

 private:
  // Siblings have the same x and rule. Either all siblings or no siblings have a bias. Either all
  // results or no results of siblings require grad.
  using Kind = std::tuple<ValueId, const Rule*, bool, bool>;

  void find_groups() {
    std::map<Kind, std::vector<NodeId>> all;
    for (NodeId n = 0; n < tape_.nodes.size(); ++n) {
      if (const auto kind = kind_of(n)) all[*kind].push_back(n);
    }
    group_of_.assign(tape_.nodes.size(), kNone);
    for (auto& [kind, nodes] : all) {
      if (nodes.size() < 2) continue;
      for (const NodeId n : nodes) group_of_[n] = static_cast<uint32_t>(groups_.size());
      groups_.push_back(std::move(nodes));
    }
  }

  // Returns the kind of a product that can be fused, or nothing. x must be a single row: with
  // several rows the parts of the fused result would not be contiguous.
  std::optional<Kind> kind_of(NodeId n) const {
    const Node& node = tape_.nodes[n];
    const std::optional<bool> by_row = weight_is_by_row(*node.signature->rule);
    if (!by_row || is_result(node.first_value)) return {};
    const auto operands = tape_.operands_of(node);
    const Value &x = tape_.values[operands[0]], &w = tape_.values[operands[1]];
    if (x.geometry->numel != w.geometry->sizes[*by_row ? 1 : 0]) return {};
    if (!is_weight(operands[1]) || w.device != x.device) return {};
    const bool bias = operands.size() > 2 && operands[2] != kNone;
    if (bias && !is_weight(operands[2])) return {};
    return Kind{operands[0], node.signature->rule, bias,
                tape_.values[node.first_value].requires_grad};
  }

  bool is_result(ValueId id) const {
    return std::find(subgraph_.results.begin(), subgraph_.results.end(), id) !=
           subgraph_.results.end();
  }

  bool is_weight(ValueId id) const {
    const Value& base = tape_.values[tape_.values[id].base];
    return base.is_graph_input() && subgraph_.is_weight[base.index] != 0;
  }

  // For each value, finds the results of the cell whose gradients flow to this value.
  void find_reaching() {
    reaching_.assign(tape_.values.size(), 0);
    for (size_t k = 0; k < subgraph_.results.size(); ++k) {
      reaching_[subgraph_.results[k]] |= static_cast<uint8_t>(1u << k);
    }
    for (size_t i = tape_.values.size(); i-- > 0;) {
      const auto id = static_cast<ValueId>(i);
      const Value& value = tape_.values[id];
      if (value.parent != kNone) {
        pass_on(reaching_[id], value.parent, value.requires_grad);
      } else if (!value.is_graph_input() && tape_.nodes[value.node].first_value == id) {
        const Node& node = tape_.nodes[value.node];
        uint8_t all = 0;
        for (uint32_t k = 0; k < node.num_values; ++k) all |= reaching_[id + k];
        for (const ValueId operand : tape_.operands_of(node)) {
          if (operand != kNone) pass_on(all, operand, tape_.needs_grad(node));
        }
      }
    }
  }

  void pass_on(uint8_t results, ValueId to, bool recorded) {
    if (recorded && tape_.values[to].requires_grad) reaching_[to] |= results;
  }

  // Rewrites the tape with the fused nodes. Values keep their numbers.
  void write_tape() {
    const Tape& from = subgraph_.captured;
    tape_.nodes.clear();
    tape_.operands.clear();
    std::vector<NodeId> number(from.nodes.size(), kNone);
    for (NodeId n = 0; n < from.nodes.size(); ++n) {
      if (number[n] != kNone) continue;
      const auto to = static_cast<NodeId>(tape_.nodes.size());
      if (group_of_[n] == kNone) {
        number[n] = to;
        Node node = from.nodes[n];
        const auto operands = from.operands_of(node);
        node.first_operand = static_cast<uint32_t>(tape_.operands.size());
        tape_.operands.insert(tape_.operands.end(), operands.begin(), operands.end());
        tape_.nodes.push_back(node);
      } else {
        for (const NodeId member : groups_[group_of_[n]]) number[member] = to;
        add_joined(groups_[group_of_[n]], to);
      }
    }
    for (ValueId id = 0; id < from.values.size(); ++id) {
      if (!from.values[id].is_graph_input()) tape_.values[id].node = number[from.values[id].node];
    }
  }

  void add_joined(const std::vector<NodeId>& group, NodeId to) {
    const Tape& from = subgraph_.captured;
    const Node& first = from.nodes[group[0]];
    Node node;
    node.first_operand = static_cast<uint32_t>(tape_.operands.size());
    node.first_value = static_cast<ValueId>(tape_.values.size());
    node.num_values = 1;
    tape_.operands.push_back(from.operands_of(first)[0]);
    std::vector<Sibling> siblings;
    int64_t width = 0;
    for (const NodeId n : group) {
      siblings.push_back(add_sibling(from.nodes[n], node.first_operand, width));
      width += siblings.back().width;
    }
    node.num_operands = static_cast<uint32_t>(tape_.operands.size()) - node.first_operand;
    Value all = tape_.values[first.first_value];
    all.node = to;
    all.base = node.first_value;
    all.geometry = geometries_.intern_contiguous(width);
    tape_.values.push_back(all);
    for (size_t i = 0; i < group.size(); ++i) {
      make_part(from.nodes[group[i]].first_value, node.first_value, siblings[i].first);
    }
    const int64_t k = from.values[from.operands_of(first)[0]].geometry->numel;
    node.signature = sign(*first.signature, make_siblings_rule(std::move(siblings), k));
    tape_.nodes.push_back(node);
  }

  Sibling add_sibling(const Node& product, uint32_t first_operand, int64_t first) {
    const auto operands = subgraph_.captured.operands_of(product);
    const auto slot = [&] { return tape_.operands.size() - first_operand; };
    Sibling sibling;
    sibling.first = first;
    sibling.width = tape_.values[product.first_value].geometry->numel;
    sibling.results = reaching_[product.first_value];
    sibling.by_row = *weight_is_by_row(*product.signature->rule);
    ValueId weight = operands[1];
    // Backward collects the products with a weight itself (WeightGradTerm), but does not collect
    // the products with a view of the weight.
    if (is_transposed(tape_, weight)) {
      weight = tape_.values[weight].base;
      sibling.by_row = !sibling.by_row;
    }
    sibling.weight = slot();
    tape_.operands.push_back(weight);
    if (operands.size() < 3 || operands[2] == kNone) return sibling;
    sibling.bias = slot();
    tape_.operands.push_back(operands[2]);
    return sibling;
  }

  // Turns the result of a product and the views of this result into views of `whole`, the fused
  // result.
  void make_part(ValueId result, ValueId whole, int64_t first) {
    for (Value& value : tape_.values) {
      if (value.base != result) continue;
      if (value.parent == kNone) value.parent = whole;
      value.base = whole;
      value.index = 0;
      value.offset += first;
    }
  }

  Signature* sign(const Signature& first, std::shared_ptr<const Rule> rule) {
    auto signature = std::make_shared<Signature>();
    signature->op = first.op;
    signature->context = first.context;
    signature->site = first.site;
    signature->position = first.position;
    signature->own_rule = std::move(rule);
    signature->rule = signature->own_rule.get();
    subgraph_.joined.push_back(signature);
    return signature.get();
  }

  Subgraph& subgraph_;
  Tape& tape_;
  GeometryTable& geometries_;
  std::vector<std::vector<NodeId>> groups_;
  std::vector<uint32_t> group_of_;  // for each node: index of its group, or kNone
  // For each value: bit set of the cell's results whose gradients flow to the value.
  std::vector<uint8_t> reaching_;
};

}  // namespace

size_t fuse_shared_input_linear(Subgraph& subgraph, GeometryTable& geometries) {
  if (!fuse_shared_input_linear_switch.is_on()) return 0;
  const size_t groups = SharedInputFuser(subgraph, geometries).run();
  fuse_shared_input_linear_switch.add_uses(groups);
  return groups;
}

}  // namespace autobatch

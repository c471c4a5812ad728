// Graph::compact: what waits gets new numbers, where most of the tape is not needed any more. Takes
// time for all that is pending, so it comes once as many nodes are finished as wait.
#include "autobatch/graph/flush_progress.h"
#include "autobatch/graph/pending_tensor.h"

#include <utility>

namespace autobatch {

class Compactor {
 public:
  explicit Compactor(Graph& graph) : graph_(graph), old_(graph.tape_) {}

  void run() {
    find_kept();
    new_value_.assign(old_.values.size(), kNone);
    nodes_before_.push_back(0);
    for (const Node& node : old_.nodes) {
      nodes_before_.push_back(nodes_before_.back() + (is_kept(node) ? 1 : 0));
    }
    for (ValueId id = 0; id < old_.values.size(); ++id) {
      if (kept_[id]) append(id);
    }
    for (const Node& node : old_.nodes) {
      if (is_kept(node)) copy_node(node);
    }
    for (const auto& [content, when] : old_.written_at) {
      if (kept_[content]) new_.written_at[new_value_[content]] = nodes_before_[when];
    }
    for (const auto& [content, version] : old_.versions) {
      if (kept_[content]) new_.versions[new_value_[content]] = version;
    }
    install();
  }

 private:
  static bool is_kept(const Node& node) { return node.state == NodeState::kWaiting; }

  void keep(ValueId id) {
    for (; id != kNone && !kept_[id]; id = old_.values[id].parent) kept_[id] = 1;
  }

  void find_kept() {
    kept_.assign(old_.values.size(), 0);
    for (const Node& node : old_.nodes) {
      if (!is_kept(node)) continue;
      for (uint32_t k = 0; k < node.num_values; ++k) keep(node.first_value + k);
      for (ValueId operand : old_.operands_of(node)) keep(operand);
    }
    for (ValueId id = 0; id < old_.values.size(); ++id) {
      if (old_.values[id].tensor != nullptr) keep(id);
    }
    for (const GraphInput& graph_input : old_.graph_inputs) {
      if (graph_input.is_weight) keep(graph_input.value);
    }
  }

  void append(ValueId id) {
    const auto to = static_cast<ValueId>(new_.values.size());
    new_value_[id] = to;
    Value value = old_.values[id];
    value.next_view = value.uses = kNone;
    if (value.node != kNone) value.node = nodes_before_[value.node];
    if (value.base == id) {
      value.base = to;
      if (value.is_graph_input()) move_graph_input(value, to);
    } else {
      value.base = new_value_[value.base];
      value.parent = new_value_[value.parent];
      if (value.is_graph_input()) value.index = new_.values[value.base].index;
      value.next_view = std::exchange(new_.values[value.base].next_view, to);
      new_.take_aparts(to, old_, id, [&](ValueId of) { return new_value_[of]; });
    }
    if (value.tensor != nullptr) value.tensor->stand_for(to);
    new_.values.push_back(value);
  }

  void move_graph_input(Value& value, ValueId to) {
    new_.graph_inputs.push_back(std::move(old_.graph_inputs[value.index]));
    new_.graph_inputs.back().value = to;
    value.index = static_cast<uint32_t>(new_.graph_inputs.size() - 1);
  }

  void copy_node(Node node) {
    const auto operands = old_.operands_of(node);
    node.first_operand = static_cast<uint32_t>(new_.operands.size());
    for (ValueId operand : operands) {
      new_.operands.push_back(operand == kNone ? kNone : new_value_[operand]);
    }
    node.first_value = new_value_[node.first_value];
    new_.nodes.push_back(node);
  }

  template <class Index>
  void renumber(Index& index) const {
    for (auto at = index.begin(); at != index.end();) {
      at->second = new_value_[at->second];
      at = at->second == kNone ? index.erase(at) : std::next(at);
    }
  }

  void install() {
    renumber(graph_.graph_input_index_);
    renumber(graph_.weight_index_);
    ++graph_.numbering_;
    graph_.renumbered_ += old_.values.size();
    graph_.forget_progress();
    old_ = std::move(new_);
  }

  Graph& graph_;
  Tape& old_;
  Tape new_;
  std::vector<uint8_t> kept_;         // by old value
  std::vector<ValueId> new_value_;    // likewise
  std::vector<NodeId> nodes_before_;  // by old node: how many new ones come before it
};

void Graph::compact() {
  constexpr size_t kLeast = 4096;
  if (open_record_ != nullptr || !memories_.empty()) return;
  if (num_finished_ < kLeast || num_finished_ < tape_.nodes.size() / 2) return;
  Compactor(*this).run();
}

}  // namespace autobatch

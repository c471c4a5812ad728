// Chooses the part of a graph that a read needs, and keeps track of the states of nodes.
#include "autobatch/graph/flush_progress.h"

#include "autobatch/backward/backward.h"
#include "autobatch/graph/signature.h"
#include "autobatch/graph/slice_costs.h"

#include <algorithm>
#include <utility>

namespace autobatch {

bool Tape::is_read(ValueId base) {
  uint32_t& first = values[base].uses;
  if (first == kReleased) return false;
  while (first != kNone && nodes[uses[first].reader].state != NodeState::kWaiting) {
    first = uses[first].next;
  }
  return first != kNone;
}

std::vector<NodeId> Graph::choose(at::ArrayRef<ValueId> targets) {
  see_changes();
  std::vector<NodeId> chosen;
  if (targets.empty()) {
    for (NodeId id = 0; id < tape_.nodes.size(); ++id) {
      if (tape_.nodes[id].state == NodeState::kWaiting) note_chosen(id, chosen);
    }
    return chosen;
  }
  take_needed(targets, chosen);
  take_along(chosen);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

std::vector<NodeId> Graph::choose_ready(size_t least) {
  see_changes();
  for (auto& [signature, kind] : progress_->kinds) drop_run(kind.ready, signature);
  std::vector<NodeId> chosen;
  while (chosen.size() < least) {
    Progress::Kind* largest = nullptr;
    for (auto& [signature, kind] : progress_->kinds) {
      if (largest == nullptr || kind.ready.size() > largest->ready.size()) largest = &kind;
    }
    if (largest == nullptr || largest->ready.empty()) break;
    const size_t first = chosen.size();
    for (NodeId id : std::exchange(largest->ready, {})) note_chosen(id, chosen);
    for (size_t next = first, end = chosen.size(); next < end; ++next) {
      release_readers(chosen[next], chosen);
    }
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Removes the nodes of `ready` that do not wait any more, or whose signature has changed.
void Graph::drop_run(std::vector<NodeId>& ready, const Signature* signature) {
  std::erase_if(ready, [&](NodeId id) {
    return tape_.nodes[id].state != NodeState::kWaiting || tape_.nodes[id].signature != signature;
  });
}

std::vector<NodeId> Graph::choose_slice(SliceCosts& costs) {
  see_changes();
  auto& kinds = progress_->kinds;
  for (auto it = kinds.begin(); it != kinds.end();) {
    drop_run(it->second.ready, it->first);
    it = it->second.ready.empty() && it->second.turn != progress_->round ? kinds.erase(it) : ++it;
  }
  std::vector<NodeId> chosen;
  while (chosen.empty() || !costs.is_full()) {
    const Signature* next = next_turn();
    if (next == nullptr) {
      ++progress_->round;
      next = next_turn();
    }
    if (next == nullptr) break;
    take_turn(next, costs, chosen);
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Returns the signature with the most ready nodes among the signatures that have not had a turn in
// this round, or null if there is no such signature.
const Signature* Graph::next_turn() {
  const Signature* next = nullptr;
  size_t most = 0;
  for (const auto& [signature, kind] : progress_->kinds) {
    if (kind.turn == progress_->round || kind.ready.size() <= most) continue;
    next = signature;
    most = kind.ready.size();
  }
  return next;
}

void Graph::take_turn(const Signature* signature, SliceCosts& costs, std::vector<NodeId>& chosen) {
  Progress::Kind& kind = progress_->kinds[signature];
  kind.turn = progress_->round;
  const size_t count = std::min(kind.ready.size(), costs.most(signature->serial));
  const size_t first = chosen.size();
  for (size_t i = 0; i < count; ++i) note_chosen(kind.ready[i], chosen);
  kind.ready.erase(kind.ready.begin(), kind.ready.begin() + static_cast<ptrdiff_t>(count));
  costs.take(signature->serial, count);
  for (size_t i = first; i < first + count; ++i) release_readers(chosen[i], chosen);
}

void Graph::see_changes() {
  if (progress_ == nullptr) progress_ = std::make_unique<Progress>();
  see_new_nodes();
  see_deaths();
  ++progress_->reads;
}

void Graph::note_chosen(NodeId id, std::vector<NodeId>& chosen) {
  tape_.nodes[id].state = NodeState::kChosen;
  chosen.push_back(id);
}

void Graph::take_needed(at::ArrayRef<ValueId> targets, std::vector<NodeId>& chosen) {
  const auto take = [&](ValueId id) {
    const Value& value = tape_.values[id];
    if (value.is_graph_input() || tape_.nodes[value.node].state != NodeState::kWaiting) return;
    note_chosen(value.node, chosen);
  };
  for (ValueId target : targets) take(target);
  for (size_t next = 0; next < chosen.size(); ++next) {
    for (ValueId operand : tape_.operands_of(tape_.nodes[chosen[next]])) {
      if (operand != kNone) take(operand);
    }
  }
}

// Adds to `chosen` the nodes that can run in the same batches as the needed nodes.
void Graph::take_along(std::vector<NodeId>& chosen) {
  const size_t needed = chosen.size();
  for (size_t next = 0; next < needed; ++next) {
    Progress::Kind& kind = progress_->kinds[tape_.nodes[chosen[next]].signature];
    if (std::exchange(kind.wanted, progress_->reads) == progress_->reads) continue;
    for (NodeId id : std::exchange(kind.ready, {})) note_ready(id, chosen);
  }
  for (size_t next = 0; next < chosen.size(); ++next) release_readers(chosen[next], chosen);
}

// Decrements the count of missing operands of each reader of the node. Handles readers that become
// ready.
void Graph::release_readers(NodeId id, std::vector<NodeId>& chosen) {
  const Node node = tape_.nodes[id];
  for (uint32_t k = 0; k < node.num_values; ++k) {
    const uint32_t first = tape_.values[node.first_value + k].uses;
    for (uint32_t use = first; use != kNone; use = tape_.uses[use].next) {
      const NodeId reader = tape_.uses[use].reader;
      if (tape_.nodes[reader].state != NodeState::kWaiting) continue;
      if (--progress_->missing[reader] == 0) note_ready(reader, chosen);
    }
  }
}

// Handles a node that has become ready. If this read already runs nodes of the same signature,
// chooses the node too. Otherwise adds the node to the ready nodes of the signature.
void Graph::note_ready(NodeId id, std::vector<NodeId>& chosen) {
  const Node& node = tape_.nodes[id];
  if (node.state != NodeState::kWaiting) return;
  Progress::Kind& kind = progress_->kinds[node.signature];
  kind.wanted == progress_->reads ? note_chosen(id, chosen) : kind.ready.push_back(id);
}

void Graph::see_new_nodes() {
  Progress& progress = *progress_;
  const auto count = static_cast<NodeId>(tape_.nodes.size());
  const NodeId first = std::exchange(progress.seen, count);
  tape_.uses.resize(tape_.operands.size());
  progress.missing.resize(count, 0);
  for (NodeId id = first; id < count; ++id) {
    const Node& node = tape_.nodes[id];
    for (uint32_t at = node.first_operand; at < node.first_operand + node.num_operands; ++at) {
      if (tape_.operands[at] == kNone) continue;
      Value& base = tape_.values[tape_.values[tape_.operands[at]].base];
      tape_.uses[at] = {id, std::exchange(base.uses, at)};
      if (base.is_graph_input()) continue;
      if (tape_.nodes[base.node].state == NodeState::kWaiting) ++progress.missing[id];
    }
  }
  for (NodeId id = count; id-- > first;) forget_unless_wanted(id);
  for (NodeId id = first; id < count; ++id) {
    const Node& node = tape_.nodes[id];
    if (node.state == NodeState::kWaiting && progress.missing[id] == 0) {
      progress.kinds[node.signature].ready.push_back(id);
    }
  }
}

void Graph::see_deaths() {
  for (ValueId id : std::exchange(died_, {})) {
    const Value& value = tape_.values[id];
    if (value.is_graph_input()) continue;
    const NodeState state = tape_.nodes[value.node].state;
    if (state == NodeState::kWaiting) forget_unless_wanted(value.node);
    if (state == NodeState::kComputed) review(value.base);
  }
}

bool Graph::is_wanted(NodeId id) {
  const Node& node = tape_.nodes[id];
  for (uint32_t k = 0; k < node.num_values; ++k) {
    if (tape_.is_read(node.first_value + k)) return true;
  }
  for (uint32_t k = 0; k < node.num_values; ++k) {
    if (tape_.is_looked_at(node.first_value + k)) return true;
  }
  return false;
}

// Drops the node `first` if nothing needs its results. Then also drops the nodes whose results were
// needed only by dropped nodes.
void Graph::forget_unless_wanted(NodeId first) {
  std::vector<NodeId>& stack = progress_->stack;
  stack.push_back(first);
  while (!stack.empty()) {
    const NodeId id = stack.back();
    stack.pop_back();
    Node& node = tape_.nodes[id];
    if (node.state != NodeState::kWaiting || is_wanted(id)) continue;
    node.state = NodeState::kGone;
    ++num_finished_;
    for (ValueId operand : tape_.operands_of(node)) {
      if (operand == kNone || tape_.values[operand].is_graph_input()) continue;
      const Value& value = tape_.values[operand];
      const NodeState state = tape_.nodes[value.node].state;
      if (state == NodeState::kWaiting) stack.push_back(value.node);
      if (state == NodeState::kComputed) review(value.base);
    }
  }
}

void Graph::note_computed(at::ArrayRef<NodeId> chosen, at::ArrayRef<NodeId> ran, bool all) {
  for (NodeId id : ran) tape_.nodes[id].state = NodeState::kComputed;
  num_computed_ += ran.size();
  for (NodeId id : chosen) {  // merged nodes (fuse_sums.h) did not run
    NodeState& state = tape_.nodes[id].state;
    if (all && state != NodeState::kComputed) state = NodeState::kGone;
    if (!tape_.nodes[id].is_to_run()) ++num_finished_;
  }
  if (!all) return;
  for (NodeId id : ran) {
    const Node node = tape_.nodes[id];
    for (uint32_t k = 0; k < node.num_values; ++k) review(node.first_value + k);
    for (ValueId operand : tape_.operands_of(node)) {
      if (operand == kNone) continue;
      const Value& value = tape_.values[operand];
      value.is_graph_input() ? progress_->note_input(*this, id, value.base) : review(value.base);
    }
  }
  progress_->ran += ran.size();
  if (progress_->ran > progress_->inputs.size()) progress_->release_inputs(*this);
}

void Graph::Progress::note_input(Graph& graph, NodeId reader, ValueId base) {
  const Tape& tape = graph.tape_;
  has_gradients = has_gradients || tape.needs_grad(tape.nodes[reader]);
  if (!has_gradients && !tape.graph_inputs[tape.values[base].index].is_weight)
    inputs.push_back(base);
}

// Releases the graph inputs that the program has released and that no node will read.
void Graph::Progress::release_inputs(Graph& graph) {
  ran = 0;
  if (has_gradients) return inputs.clear();
  std::sort(inputs.begin(), inputs.end());
  inputs.erase(std::unique(inputs.begin(), inputs.end()), inputs.end());
  std::erase_if(inputs, [&](ValueId base) {
    GraphInput& graph_input = graph.tape_.graph_inputs[graph.tape_.values[base].index];
    if (!graph_input.tensor.defined() || graph_input.is_weight) return true;
    if (graph_input.tensor.use_count() > 1 || graph.tape_.is_read(base)) return false;
    if (graph.tape_.is_looked_at(base)) return false;
    graph.forget_graph_input(graph_input);
    graph_input = GraphInput{};
    graph_input.value = base;
    return true;
  });
}

void Graph::review(ValueId base) {
  if (open_record_ == nullptr) return;
  uint32_t& uses = tape_.values[base].uses;
  if (uses == kReleased || tape_.is_read(base) || tape_.is_looked_at(base)) return;
  uses = kReleased;
  Store& store = open_record_->store;
  const uint32_t slab = store.places[base].slab;
  if (slab == kNone) return;
  if (--store.holders[slab] == 0 && store.savers[slab] == 0) store.slabs[slab] = at::Tensor();
}

bool Graph::may_be_read(ValueId base) {
  const NodeState state = tape_.nodes[tape_.values[base].node].state;
  if (state != NodeState::kComputed) return state == NodeState::kWaiting;
  if (open_record_ == nullptr) return false;
  Store& store = open_record_->store;
  const uint32_t slab = store.places[base].slab;
  if (slab == kNone || !store.slabs[slab].defined()) return false;
  uint32_t& uses = tape_.values[base].uses;
  if (uses == kReleased) {  // the slab was kept for other results or for backward
    uses = kNone;
    ++store.holders[slab];
  }
  return true;
}

void Graph::forget_progress() {
  open_record_.reset();
  progress_.reset();
  died_.clear();
  num_computed_ = num_finished_ = 0;
}

Graph::Loan::Loan(Graph& graph, Tape& to) : graph_(graph) {
  std::swap(graph.tape_, to);
  graph.lent_to_ = &to;
}

Graph::Loan::~Loan() { std::swap(graph_.tape_, *std::exchange(graph_.lent_to_, nullptr)); }

}  // namespace autobatch

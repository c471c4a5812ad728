#include "autobatch/execute/incremental_flush.h"

#include "autobatch/subgraph/subgraph.h"

#include <algorithm>

namespace autobatch {
namespace {

// Maximum number of nodes in an open record. The record grows with each read, and a reference to
// any of its parts keeps the whole record alive. A record above this maximum is closed if it cannot
// be compacted and contains more nodes than are pending in the graph. After that, unreachable parts
// can be freed.
constexpr size_t kMostNodes = size_t{1} << 16;

bool is_too_large(const Graph& graph, size_t nodes) {
  if (graph.num_computed() + nodes <= std::max(kMostNodes, graph.num_waiting())) return false;
  return graph.open_record() == nullptr || !can_be_compacted(*graph.open_record());
}

}  // namespace

bool can_be_compacted(const FlushRecord& record) {
  if (record.trace != nullptr || record.verified || !record.depths.empty()) return false;
  return std::ranges::none_of(record.batches, &BatchRecord::needs_grad);
}

bool stays_open(const Graph& graph, at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> nodes,
                bool values_only) {
  if (is_too_large(graph, nodes.size())) return false;
  const Tape& tape = graph.tape();
  for (ValueId target : targets) {
    const Value& base = tape.values[tape.values[target].base];
    if (base.is_graph_input() || (base.requires_grad && !values_only)) return false;
  }
  return std::none_of(nodes.begin(), nodes.end(),
                      [&](NodeId node) { return must_unfold(tape, node); });
}

std::vector<ValueId> results_of(const Graph& graph, at::ArrayRef<ValueId> targets) {
  std::vector<ValueId> bases;
  for (ValueId target : targets) bases.push_back(graph.value(target).base);
  std::sort(bases.begin(), bases.end());
  bases.erase(std::unique(bases.begin(), bases.end()), bases.end());
  return bases;
}

void renumber(FlushRecord& record, const Split& split) {
  if (!split.is_renumbered) return;
  const auto now = [](const std::vector<uint32_t>& old, uint32_t number) {
    return static_cast<uint32_t>(std::lower_bound(old.begin(), old.end(), number) - old.begin());
  };
  for (NodeId& id : record.order) id = now(split.nodes, id);
  std::vector<uint32_t> depths(split.nodes.size(), 0);
  for (NodeId id = 0; id < depths.size(); ++id) {
    if (split.nodes[id] < record.depths.size()) depths[id] = record.depths[split.nodes[id]];
  }
  record.depths = std::move(depths);
  record.memories.renumber([&](ValueId base) { return now(split.values, base); });
  PooledVector<Allocation> places(split.values.size());
  for (ValueId id = 0; id < places.size(); ++id) {
    if (split.values[id] < record.store.places.size()) {
      places[id] = record.store.places[split.values[id]];
    }
  }
  record.store.places = std::move(places);
}

}  // namespace autobatch

#include "autobatch/partial.h"

#include "autobatch/body.h"

#include <algorithm>

namespace autobatch {
namespace {

// An open record grows with each read, and is kept as a whole by whatever of it is held: beyond
// this it is closed, so that what nobody can reach any more may go.
constexpr size_t kMostNodes = size_t{1} << 16;
// A flush looks at all of the record, so many reads that need little each would take time that is
// quadratic in their number: it may be so many times as large as what is run now, and a bit.
constexpr size_t kMostTimes = 1024;
constexpr size_t kAlways = 2048;

}  // namespace

bool stays_open(const Graph& graph, at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> nodes,
                bool values_only) {
  const size_t most = std::min(kMostNodes, kAlways + kMostTimes * nodes.size());
  if (graph.num_computed() + nodes.size() > most) return false;
  const Tape& tape = graph.tape();
  for (ValueId target : targets) {
    const Value& base = tape.values[tape.values[target].base];
    if (base.is_outside() || (base.requires_grad && !values_only)) return false;
  }
  // Without gradients there are no autograd nodes to save, and memory is to go as soon as it can.
  const auto records = [&](NodeId node) { return tape.needs_grad(tape.nodes[node]); };
  if (graph.open_record() == nullptr && std::none_of(nodes.begin(), nodes.end(), records)) {
    return false;
  }
  return std::none_of(nodes.begin(), nodes.end(),
                      [&](NodeId node) { return must_unfold(tape, node); });
}

std::vector<uint8_t> find_read_later(const Graph& graph, at::ArrayRef<NodeId> nodes) {
  const Tape& tape = graph.tape();
  std::vector<uint8_t> read(tape.values.size(), 0);
  auto now = nodes.begin();
  for (NodeId id : graph.waiting()) {
    if (now != nodes.end() && *now == id) {
      ++now;
      continue;
    }
    for (ValueId operand : tape.operands_of(tape.nodes[id])) {
      if (operand != kNone) read[tape.values[operand].base] = 1;
    }
  }
  return read;
}

std::vector<ValueId> results_of(const Graph& graph, at::ArrayRef<ValueId> targets) {
  std::vector<ValueId> bases;
  for (ValueId target : targets) bases.push_back(graph.value(target).base);
  std::sort(bases.begin(), bases.end());
  bases.erase(std::unique(bases.begin(), bases.end()), bases.end());
  return bases;
}

void drop_unread(FlushRecord& record, const std::vector<uint8_t>& read_later) {
  std::erase_if(record.store.held_only, [&](const Store::HeldSlab& held) {
    for (ValueId id : held.values) {
      if (read_later[id] != 0 || record.tape.is_looked_at(id)) return false;
    }
    record.store.slabs[held.slab] = at::Tensor();
    return true;
  });
}

void renumber(FlushRecord& record, const Split& split) {
  if (split.node_number.empty()) return;
  for (NodeId& id : record.order) id = split.node_number[id];
  PooledVector<Place> places(split.tape.values.size());
  for (ValueId id = 0; id < record.store.places.size(); ++id) {
    if (split.value_number[id] != kNone) {
      places[split.value_number[id]] = record.store.places[id];
    }
  }
  record.store.places = std::move(places);
  for (HeldMemory& memory : record.memories) memory.base = split.value_number[memory.base];
}

}  // namespace autobatch

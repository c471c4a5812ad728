#include "autobatch/run_graph.h"

#include "autobatch/rules.h"

#include <algorithm>
#include <utility>

namespace autobatch {

RunGraph::RunGraph(const Tape& tape, const std::vector<uint8_t>& runs)
    : number_(tape.nodes.size(), kNone) {
  Ends most;
  for (NodeId id = 0; id < tape.nodes.size(); ++id) {
    if (!runs[id]) continue;
    ++most.node;
    most.input += tape.nodes[id].num_operands;
    most.extent += tape.nodes[id].num_values;
  }
  nodes_ = std::make_unique_for_overwrite<OfNode[]>(most.node);
  reads_ = std::make_unique_for_overwrite<Read[]>(most.input);
  extents_ = std::make_unique_for_overwrite<int64_t[]>(most.extent);
  end_at(most);
  Ends ends;
  for (NodeId id = 0; id < tape.nodes.size(); ++id) {
    if (runs[id]) add(tape, id, ends);
  }
  end_at(ends);
}

void RunGraph::end_at(const Ends& ends) {
  signature_.resize(ends.node);
  input_begin_.resize(size_t{ends.node} + 1);
  inputs_.resize(ends.input);
}

void RunGraph::add_kind(Signature* signature, uint32_t num_results, uint32_t first_extent) {
  signature->local = static_cast<uint32_t>(kinds_.size());
  kinds_.push_back({signature, num_results, first_extent});
  batchable_.push_back(signature->rule->batchable() ? 1 : 0);
  heavy_.push_back(signature->rule->heavy() ? 1 : 0);
  // Summed, for signatures are met in any order.
  const uint64_t mixed = reinterpret_cast<uintptr_t>(signature) * 0x9E3779B97F4A7C15U;
  family_ += mixed ^ (mixed >> 29);
}

RunGraph::Kind& RunGraph::begin(NodeId id, ValueId first_value, Signature* signature,
                                uint32_t num_results, Ends& ends) {
  const uint32_t number = ends.node++;
  number_[id] = number;
  nodes_[number] = {id, first_value, ends.extent};
  if (signature->local == kNone) add_kind(signature, num_results, ends.extent);
  signature_[number] = signature->local;
  return kinds_[signature_[number]];
}

void RunGraph::add(const Tape& tape, NodeId id, Ends& ends) {
  const Node& node = tape.nodes[id];
  const uint32_t number = ends.node;
  Kind& kind = begin(id, node.first_value, node.signature, node.num_values, ends);
  for (uint32_t k = 0; k < node.num_values; ++k) {
    const Value& value = tape.values[node.first_value + k];
    const int64_t extent = value.geometry->extent;
    extents_[ends.extent++] = extent;
    if (extent != extents_[kind.first_extent + k]) kind.is_uniform = false;
    kind.needs_grad |= value.requires_grad;
  }
  uint32_t end = ends.input;
  for (uint32_t slot = 0; slot < node.num_operands; ++slot) {
    const ValueId operand = tape.operands[node.first_operand + slot];
    if (operand == kNone) continue;
    const Value& value = tape.values[operand];
    if (value.is_outside()) continue;
    const uint32_t producer = number_[value.node];
    if (producer == kNone) {
      earlier_.push_back({number, value.base, slot});
      continue;
    }
    inputs_[end] = producer;
    reads_[end++] = {value.index, std::min(slot, kLastSlot)};
  }
  ends.input = end;
  input_begin_[ends.node] = end;
}

bool RunGraph::find_dead(const Tape& tape, std::span<const ValueId> results,
                         std::vector<uint8_t>& runs) const {
  std::vector<uint8_t> live(size(), 0);
  for (const ValueId id : results) {
    const uint32_t number = number_[tape.values[id].node];
    if (number != kNone) live[number] = 1;
  }
  for (uint32_t number = size(); number-- > 0;) {
    if (!live[number]) continue;
    for (const uint32_t producer : producers(number)) live[producer] = 1;
  }
  bool any = false;
  for (uint32_t number = 0; number < size(); ++number) {
    if (live[number]) continue;
    runs[id(number)] = 0;
    any = true;
  }
  return any;
}

// All but what the node reads.
void RunGraph::move(uint32_t from, const Kind& before, Ends& ends) {
  const auto [id, first_value, first_extent] = nodes_[from];
  Kind& kind = begin(id, first_value, before.signature, before.num_results, ends);
  kind.needs_grad |= before.needs_grad;
  for (uint32_t k = 0; k < before.num_results; ++k) {
    const int64_t extent = extents_[first_extent + k];
    extents_[ends.extent++] = extent;
    if (extent != extents_[kind.first_extent + k]) kind.is_uniform = false;
  }
}

void RunGraph::update(const Tape& tape, const std::vector<uint8_t>& runs) {
  forget_kinds();
  const std::vector<Kind> kinds = std::exchange(kinds_, {});
  const std::vector<EarlierRead> earlier = std::exchange(earlier_, {});
  batchable_.clear();
  heavy_.clear();
  family_ = 0;
  // In place: what a sum reads is what the nodes in it, which go, have read.
  Ends ends;
  std::vector<uint32_t> renumbered(size(), kNone);
  uint32_t begin = 0;
  auto read = earlier.begin();
  for (uint32_t number = 0; number < size(); ++number) {
    const NodeId id = nodes_[number].id;
    const uint32_t end = input_begin_[number + 1];
    const auto first = read;
    while (read != earlier.end() && read->reader == number) ++read;
    number_[id] = kNone;
    if (runs[id]) {
      renumbered[number] = ends.node;
      const Kind& before = kinds[signature_[number]];
      if (runs[id] == kChanged) {
        add(tape, id, ends);
      } else {
        for (auto e = first; e != read; ++e) earlier_.push_back({ends.node, e->base, e->slot});
        move(number, before, ends);
        for (uint32_t e = begin; e < end; ++e) {
          reads_[ends.input] = reads_[e];
          inputs_[ends.input++] = renumbered[inputs_[e]];
        }
        input_begin_[ends.node] = ends.input;
      }
    }
    begin = end;
  }
  end_at(ends);
}

void RunGraph::forget_kinds() {  // signatures outlive the flush and its failures
  for (const Kind& kind : kinds_) kind.signature->local = kNone;
}

ScheduleInput RunGraph::view() const {
  ScheduleInput s;
  s.signature = signature_;
  s.input_begin = input_begin_;
  s.inputs = inputs_;
  s.num_signatures = static_cast<uint32_t>(kinds_.size());
  s.batchable = batchable_;
  s.heavy = heavy_;
  s.family = family_;
  return s;
}

BoundInput RunGraph::take_bound_input() {
  return {std::move(signature_), std::move(input_begin_), std::move(inputs_),
          std::move(batchable_)};
}

void RunGraph::append_order(std::vector<NodeId>& order) const {
  order.reserve(order.size() + order_.size());
  for (const uint32_t number : order_) order.push_back(nodes_[number].id);
}

}  // namespace autobatch

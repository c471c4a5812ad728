#include "autobatch/backward/consumed_nodes.h"

#include "autobatch/backward/saved_tensor_check.h"
#include "autobatch/graph/op_registry.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace autobatch {
namespace {

void find_readers_of_shared(FlushRecord& record) {
  const Tape& tape = record.tape;
  for (NodeId node : record.order) {
    if (tape.nodes[node].is_shared) record.readers_of_shared.try_emplace(node);
  }
  if (record.readers_of_shared.empty()) return;
  for (NodeId node : record.order) {
    if (!tape.needs_grad(tape.nodes[node])) continue;
    for (ValueId id : tape.operands_of(tape.nodes[node])) {
      if (id == kNone || !tape.values[id].requires_grad) continue;
      const auto shared = record.readers_of_shared.find(tape.values[id].node);
      if (shared != record.readers_of_shared.end()) shared->second.push_back(node);
    }
  }
}

// Whether the node was consumed before the pass of `task`, at least for one instance.
bool was_consumed(const FlushRecord& record, const BackwardTask& task, NodeId node) {
  return record.consumed[node] ? task.consumed[node] == 0 : task.shared_again.contains(node);
}

bool gets_gradient_again(const FlushRecord& record, const BackwardTask& task, NodeId node) {
  const auto shared = record.readers_of_shared.find(node);
  return shared != record.readers_of_shared.end() &&
         std::ranges::any_of(shared->second, [&](NodeId reader) {
           return task.reached[reader] != 0 && was_consumed(record, task, reader);
         });
}

void raise_if_kept(const FlushRecord& record, NodeId node) {
  if (!keeps_anything(record.tape, record.tape.nodes[node])) return;
  raise_consumed(record.tape.nodes[node].signature->op->name);
}

}  // namespace

void check_not_consumed(const FlushRecord& record, NodeId node) {
  if (record.consumed[node]) raise_if_kept(record, node);
}

void check_not_consumed(const FlushRecord& record, BackwardTask& task, NodeId node) {
  if (gets_gradient_again(record, task, node)) task.shared_again.insert(node);
  if (was_consumed(record, task, node)) raise_if_kept(record, node);
}

void init_consumed(FlushRecord& record) {
  for (const Node& node : record.tape.nodes) record.consumed.push_back(node.spent ? 1 : 0);
  for (BatchRecord& batch : record.batches) {
    if (!batch.needs_grad) continue;
    for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
      batch.consumed += record.consumed[record.order[i]];
    }
    record.num_unconsumed += batch.count - batch.consumed;
  }
  find_readers_of_shared(record);
}

bool may_consume(const FlushRecord& record, NodeId node) {
  const auto shared = record.readers_of_shared.find(node);
  return shared == record.readers_of_shared.end() ||
         std::ranges::all_of(shared->second,
                             [&](NodeId reader) { return record.consumed[reader] != 0; });
}

void note_captured_gradient(Graph& graph, std::vector<NodeId> nodes) {
  const Tape& tape = graph.tape();
  std::ranges::sort(nodes, std::greater());  // a node comes after its readers
  // For each shared node: the number of readers that are not spent.
  std::unordered_map<NodeId, size_t> unspent_readers;
  for (NodeId node : nodes) {
    tape.nodes[node].is_shared ? void(unspent_readers[node]) : graph.note_spent(node);
  }
  if (unspent_readers.empty()) return;
  const auto add_to_operands = [&](const Node& reader, size_t change) {
    for (ValueId id : tape.operands_of(reader)) {
      if (id == kNone || !tape.values[id].requires_grad) continue;
      const auto shared = unspent_readers.find(tape.values[id].node);
      if (shared != unspent_readers.end()) shared->second += change;
    }
  };
  for (const Node& node : tape.nodes) {
    if (!node.spent && node.state != NodeState::kGone && tape.needs_grad(node))
      add_to_operands(node, 1);
  }
  for (NodeId node : nodes) {
    if (!tape.nodes[node].is_shared || unspent_readers.at(node) != 0) continue;
    graph.note_spent(node);
    add_to_operands(tape.nodes[node], static_cast<size_t>(-1));
  }
}

void note_recomputed(FlushRecord& record, std::vector<NodeId> nodes) {
  std::ranges::sort(nodes, std::greater());  // a node comes after its readers
  for (NodeId node : nodes) {
    if (!record.tape.values[record.tape.nodes[node].first_value].requires_grad) continue;
    if (!may_consume(record, node)) continue;
    if (!std::exchange(record.consumed[node], 1)) --record.num_unconsumed;
  }
}

}  // namespace autobatch

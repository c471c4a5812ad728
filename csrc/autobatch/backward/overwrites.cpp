#include "autobatch/backward/overwrites.h"

#include "autobatch/backward/saved_tensor_check.h"
#include "autobatch/common/plain_state.h"
#include "autobatch/graph/pending_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>

namespace autobatch {
namespace {

void keep(GraphInput& graph_input) {
  if (graph_input.is_copy || !graph_input.data.defined() || graph_input.as_read.defined()) return;
  graph_input.as_read = copy_as_read(graph_input.data);
}

// Returns the range of a slab in which the record keeps a computed value.
at::Tensor memory_of(const FlushRecord& record, ValueId base) {
  const Allocation& place = record.store.places[base];
  return record.store.slabs[place.slab].narrow(0, place.offset,
                                               record.tape.values[base].geometry->extent);
}

bool reads(const GraphInput& graph_input, const c10::StorageImpl* storage) {
  return graph_input.data.defined() && graph_input.data.has_storage() &&
         graph_input.data.storage().unsafeGetStorageImpl() == storage;
}

}  // namespace

void ReadRecords::add(const std::shared_ptr<FlushRecord>& record) {
  if (record->held.empty()) return;
  if (new_.size() + indexed_ >= sweep_at_) sweep();
  new_.push_back(record);
}

// Drops the references to deleted records, because a weak reference keeps the memory of the record
// object itself allocated.
void ReadRecords::sweep() {
  std::erase_if(new_, [](const auto& record) { return record.expired(); });
  indexed_ = 0;
  for (auto at = readers_.begin(); at != readers_.end();) {
    std::erase_if(at->second, [](const Reader& reader) { return reader.record.expired(); });
    indexed_ += at->second.size();
    at = at->second.empty() ? readers_.erase(at) : std::next(at);
  }
  sweep_at_ = std::max<size_t>(64, 2 * (new_.size() + indexed_));
}

void ReadRecords::index_new() {
  for (const auto& weak : new_) {
    const auto record = weak.lock();
    if (record == nullptr) continue;
    for (uint32_t i = 0; i < record->tape.graph_inputs.size(); ++i) {
      const GraphInput& graph_input = record->tape.graph_inputs[i];
      if (graph_input.is_copy || !graph_input.data.defined() || !graph_input.data.has_storage())
        continue;
      readers_[graph_input.data.storage().unsafeGetStorageImpl()].push_back({weak, i});
      ++indexed_;
    }
  }
  new_.clear();
}

void ReadRecords::before_write(Graph& graph, const at::Tensor& to) {
  // If the storage has a single owner, no graph input reads it.
  if (!to.has_storage() || to.storage().use_count() == 1) return;
  const c10::StorageImpl* storage = to.storage().unsafeGetStorageImpl();
  graph.for_each_graph_input([&](GraphInput& graph_input) {
    if (reads(graph_input, storage)) keep(graph_input);
  });
  index_new();
  const auto found = readers_.find(storage);
  if (found == readers_.end()) return;
  for (const Reader& reader : found->second) {
    const auto record = reader.record.lock();
    if (record == nullptr) continue;
    const std::lock_guard<std::mutex> lock(record->mutex);
    GraphInput& graph_input = record->tape.graph_inputs[reader.graph_input];
    if (!record->freed && reads(graph_input, storage)) keep(graph_input);
  }
  indexed_ -= found->second.size();
  readers_.erase(found);
}

void ReadRecords::before_pause() {
  index_new();
  for (const auto& [storage, readers] : readers_) {
    for (const Reader& reader : readers) {
      const auto record = reader.record.lock();
      if (record == nullptr) continue;
      const std::lock_guard<std::mutex> lock(record->mutex);
      GraphInput& graph_input = record->tape.graph_inputs[reader.graph_input];
      if (!record->freed && !graph_input.is_weight && reads(graph_input, storage))
        keep(graph_input);
    }
  }
  readers_.clear();
  indexed_ = 0;
}

std::vector<UnseenWrite> find_unseen_writes(const FlushRecord& record) {
  std::vector<UnseenWrite> unseen;
  if (!any_aliases()) return unseen;
  for (const HeldMemory& memory : record.memories) {
    const c10::Storage storage(memory.storage.lock());
    if (!storage || !has_aliases(storage) || !record.has_values(memory.base)) continue;
    const Value& value = record.tape.values[memory.base];
    const PlainStateGuard plain;
    const at::Tensor now =
        at::empty({0}, value.options()).set_(storage, 0, {value.geometry->extent}, {1});
    if (!is_same(now, memory_of(record, memory.base))) unseen.push_back({memory.base, now});
  }
  std::ranges::sort(unseen, {}, &UnseenWrite::base);
  return unseen;
}

const UnseenWrite* find_unseen_write(const std::vector<UnseenWrite>& unseen, ValueId base) {
  const auto found = std::ranges::lower_bound(unseen, base, {}, &UnseenWrite::base);
  return found == unseen.end() || found->base != base ? nullptr : &*found;
}

AsReadGuard::AsReadGuard(FlushRecord& record, const BackwardTask& task, NodeSpan nodes)
    : record_(record) {
  if (!task.any_kept && task.unseen.empty()) return;
  for (size_t m = 0; m < nodes.size(); ++m) {
    const Node& node = record.tape.nodes[nodes[m]];
    if (task.any_kept) replace_graph_input(node);
    if (!task.unseen.empty()) replace_computed(task.unseen, node);
  }
}

void AsReadGuard::replace_graph_input(const Node& node) {
  Tape& tape = record_.tape;
  for (uint32_t slot = 0; slot < node.num_operands; ++slot) {
    const ValueId operand = tape.operands[node.first_operand + slot];
    if (operand == kNone) continue;
    const Value& base = tape.values[tape.values[operand].base];
    if (!base.is_graph_input()) continue;
    GraphInput& graph_input = tape.graph_inputs[base.index];
    if (!is_overwritten(graph_input) || saves_operand(tape, node, slot)) continue;
    replaced_.emplace_back(base.index, std::exchange(graph_input.data, graph_input.as_read));
  }
}

void AsReadGuard::replace_computed(const std::vector<UnseenWrite>& unseen, const Node& node) {
  const Tape& tape = record_.tape;
  for (uint32_t slot = 0; slot < node.num_operands; ++slot) {
    const ValueId operand = tape.operands[node.first_operand + slot];
    if (operand == kNone) continue;
    const UnseenWrite* write = find_unseen_write(unseen, tape.values[operand].base);
    if (write != nullptr && saves_operand(tape, node, slot)) exchange(*write);
  }
  for (uint32_t k = 0; k < node.num_values; ++k) {
    const UnseenWrite* write = find_unseen_write(unseen, node.first_value + k);
    if (write != nullptr && saves_result(tape, node, k)) exchange(*write);
  }
}

// A value that several nodes save is exchanged several times. The exchanges are undone in reverse
// order, so the last step restores the original content.
void AsReadGuard::exchange(const UnseenWrite& write) {
  const at::Tensor row = memory_of(record_, write.base);
  const PlainStateGuard plain;
  exchanged_.emplace_back(row, row.clone());
  row.copy_(write.now);
}

AsReadGuard::~AsReadGuard() {
  while (!exchanged_.empty()) {
    const PlainStateGuard plain;
    exchanged_.back().first.copy_(exchanged_.back().second);
    exchanged_.pop_back();
  }
  for (auto& [index, data] : replaced_) record_.tape.graph_inputs[index].data = std::move(data);
}

}  // namespace autobatch

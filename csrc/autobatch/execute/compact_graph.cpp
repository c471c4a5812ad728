// Implements Graph::compact, which renumbers the waiting nodes and their values if most nodes of
// the tape are finished. The time is proportional to the number of all nodes of the tape. Therefore
// compaction runs only when at least half of the nodes are finished.
//
// A result that was computed in an open record (incremental_flush.h) is kept as long as something
// refers to the result.
#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/execute/incremental_flush.h"
#include "autobatch/graph/flush_progress.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/rules/flush_record.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace autobatch {
namespace {

constexpr size_t kLeast = 4096;  // minimum number of finished nodes for a compaction
// If less than 1/kSparse of a slab is in use, the results in the slab are moved to a smaller slab.
constexpr int64_t kSparse = 4;

// Reduces the slabs of an open record to the results that are kept.
class SlabCompactor {
 public:
  explicit SlabCompactor(Store& store) : old_(store), numbers_(store.slabs.size(), kNone) {}

  // Adds a result that is kept. Must be called once for each kept result, in the order of the
  // values.
  void keep(Allocation& place, const Value& value) {
    uint32_t& number = numbers_[place.slab];
    if (number == kNone) {
      number = static_cast<uint32_t>(new_.slabs.size());
      new_.slabs.push_back(old_.slabs[place.slab]);
      new_.lengths.push_back(old_.lengths[place.slab]);
      new_.holders.push_back(0);
      used_.push_back(0);
    }
    place.slab = place.grad = number;
    ++new_.holders[number];
    used_[number] += value.geometry->extent;
    kept_.emplace_back(&place, value.geometry->extent);
  }

  void install(PooledVector<Allocation> places) {
    std::vector<at::Tensor> from(new_.slabs.size());
    for (uint32_t slab = 0; slab < from.size(); ++slab) {
      if (used_[slab] * kSparse >= new_.lengths[slab]) continue;
      from[slab] = new_.slabs[slab];
      new_.slabs[slab] = pooled_empty(used_[slab], from[slab].options());
      new_.lengths[slab] = std::exchange(used_[slab], 0);
    }
    for (const auto& [place, extent] : kept_) {
      const uint32_t slab = place->slab;
      if (from[slab].defined()) {
        const int64_t to = std::exchange(used_[slab], used_[slab] + extent);
        copy(from[slab], place->offset, new_.slabs[slab], to, extent);
        place->offset = to;
      }
      place->grad_offset = place->offset;
    }
    new_.grad_lengths = new_.lengths;
    new_.savers.assign(new_.slabs.size(), 0);
    for (uint32_t slab = 0; slab < new_.slabs.size(); ++slab) new_.held.push_back(slab);
    new_.places = std::move(places);
    old_ = std::move(new_);
  }

 private:
  static void copy(const at::Tensor& from, int64_t first, const at::Tensor& to, int64_t at,
                   int64_t count) {
    if (!has_host_memory(from.device())) {
      to.narrow(0, at, count).copy_(from.narrow(0, first, count));
      return;
    }
    const auto size = static_cast<int64_t>(from.element_size());
    std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + at * size,
                static_cast<const char*>(from.const_data_ptr()) + first * size,
                static_cast<size_t>(count * size));
  }

  Store& old_;
  Store new_;
  std::vector<uint32_t> numbers_;                      // for each old slab: its new number
  std::vector<int64_t> used_;                          // for each new slab: number of kept elements
  std::vector<std::pair<Allocation*, int64_t>> kept_;  // place and extent of each kept result
};

}  // namespace

class Compactor {
 public:
  explicit Compactor(Graph& graph)
      : graph_(graph), old_(graph.tape_), record_(graph.open_record_.get()) {}

  void run() {
    find_kept();
    if (record_ != nullptr) find_kept_results();
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
    find_sharers(new_, old_);
    if (record_ != nullptr) compact_record();
    install();
  }

 private:
  // Whether and why a value is kept. kLookedAt: something refers to the value. kAlong: something
  // refers to another result of the value's node.
  enum Kept : uint8_t { kNo, kLookedAt, kAlong };

  // A computed node has a number only if its results are kept (find_kept_results).
  static bool is_kept(const Node& node) {
    return node.state == NodeState::kWaiting || node.number != kNone;
  }

  void keep(ValueId id) {
    for (; id != kNone && kept_[id] == kNo; id = old_.values[id].parent) kept_[id] = kLookedAt;
  }

  void find_kept() {
    kept_.assign(old_.values.size(), kNo);
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
    for (const auto& [base, results] : old_.sharers) {
      for (ValueId id : results) {
        if (old_.is_looked_at(id)) keep(reinterpreted_value(old_, id));
      }
    }
  }

  // Marks the computed nodes that have a result to which something refers. All results of such a
  // node are kept, because their numbers must be consecutive.
  void find_kept_results() {
    for (NodeId id : record_->order) {
      Node& node = old_.nodes[id];
      const auto first = kept_.begin() + node.first_value, last = first + node.num_values;
      if (std::find(first, last, kLookedAt) == last) continue;
      node.number = 0;
      std::replace(first, last, kNo, kAlong);
    }
  }

  void append(ValueId id) {
    const auto to = static_cast<ValueId>(new_.values.size());
    new_value_[id] = to;
    Value value = old_.values[id];
    value.next_view = kNone;
    value.uses = kept_[id] == kAlong ? kReleased : kNone;
    if (value.node != kNone) value.node = nodes_before_[value.node];
    if (value.base == id) {
      value.base = to;
      if (value.is_graph_input()) move_graph_input(value, to);
    } else {
      value.base = new_value_[value.base];
      value.parent = new_value_[value.parent];
      if (value.is_graph_input()) value.index = new_.values[value.base].index;
      value.next_view = std::exchange(new_.values[value.base].next_view, to);
      new_.take_element_maps(to, old_, id, [&](ValueId of) { return new_value_[of]; });
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
    // The operands of a computed node may have been removed.
    const bool reads = node.state == NodeState::kWaiting;
    for (ValueId operand : operands) {
      new_.operands.push_back(operand == kNone || !reads ? kNone : new_value_[operand]);
    }
    node.first_value = new_value_[node.first_value];
    node.number = kNone;
    new_.nodes.push_back(node);
  }

  // Keeps the remaining results and nodes in the record, and removes all batches from the record.
  void compact_record() {
    PooledVector<Allocation> places(new_.values.size());
    SlabCompactor slabs(record_->store);
    std::vector<NodeId> order;
    for (NodeId id = 0; id < new_.nodes.size(); ++id) {
      if (new_.nodes[id].state == NodeState::kComputed) order.push_back(id);
    }
    const PooledVector<Allocation>& old_places = record_->store.places;
    for (ValueId id = 0; id < old_places.size(); ++id) {
      if (kept_[id] != kLookedAt || old_places[id].slab == kNone) continue;
      const ValueId to = new_value_[id];
      places[to] = old_places[id];
      slabs.keep(places[to], new_.values[to]);
    }
    slabs.install(std::move(places));
    record_->order = std::move(order);
    record_->batches.clear();
    record_->memories.renumber([&](ValueId base) { return new_value_[base]; });
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
    const std::shared_ptr<FlushRecord> record = graph_.open_record_;
    const std::unique_ptr<Graph::Progress> before = std::move(graph_.progress_);
    graph_.forget_progress();
    old_ = std::move(new_);
    if (record != nullptr) keep_open(record, *before);
  }

  // Keeps the record open. Also keeps the turns of signatures in slices (Graph::choose_slice), so
  // that no signature waits longer because of the compaction.
  void keep_open(std::shared_ptr<FlushRecord> record, Graph::Progress& before) {
    graph_.num_computed_ = graph_.num_finished_ = record->order.size();
    graph_.open_record_ = std::move(record);
    graph_.progress_ = std::make_unique<Graph::Progress>();
    Graph::Progress& progress = *graph_.progress_;
    progress.kinds = std::move(before.kinds);
    for (auto& [signature, kind] : progress.kinds) kind.ready.clear();
    progress.reads = before.reads;
    progress.round = before.round;
    progress.kept = graph_.num_computed_;
  }

  Graph& graph_;
  Tape& old_;
  FlushRecord* record_;  // the open record; null if there is none
  Tape new_;
  std::vector<uint8_t> kept_;         // for each old value: whether and why it is kept (Kept)
  std::vector<ValueId> new_value_;    // for each old value: its new number
  std::vector<NodeId> nodes_before_;  // for each old node: number of new nodes before it
};

void Graph::compact() {
  if (!memories_.empty() || num_finished_ < kLeast) return;
  if (open_record_ == nullptr) {
    if (num_finished_ >= tape_.nodes.size() / 2) Compactor(*this).run();
    return;
  }
  // Nodes that the last compaction kept may be needed for a long time, so these nodes are not
  // counted.
  const size_t left = num_waiting() + progress_->kept;
  if (num_finished_ - progress_->kept < std::max(kLeast, 2 * left)) return;
  if (can_be_compacted(*open_record_)) Compactor(*this).run();
}

}  // namespace autobatch

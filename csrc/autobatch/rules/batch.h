// What a rule sees of a batch: its members' operands and results, gathered as it asks for them.
// Values of a batch are ranges of slabs: one flat buffer for each output of each signature, in the
// order of the schedule, so that members' results lie side by side, batch after batch.
#pragma once

#include "autobatch/common/pooled_memory.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/signature.h"
#include "autobatch/kernels/gather.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace autobatch {

class WeightCopies;

// The memory of a flush: where each computed value lies, and where its gradient will.
struct Allocation {
  uint32_t slab = kNone;
  uint32_t grad = kNone;
  int64_t offset = 0;  // elements from the start of the slab
  int64_t grad_offset = 0;
};

// A slab lives from the first batch that writes to it to the last that reads it, or, if a rule's
// backward does, until all batches whose rules do are differentiated (memory_plan.h).
struct Store {
  std::vector<at::Tensor> slabs;    // 1-D; undefined before and after
  std::vector<int64_t> lengths;     // of the slabs, in elements
  PooledVector<Allocation> places;  // by value; only of results that were computed
  std::vector<int64_t> grad_lengths;
  std::vector<std::vector<uint32_t>> last_use;  // by batch to be run: the slabs that go after it
  // Slabs that tensors or later nodes look at: unless a backward reads them they go once all
  // tensors have copies, or nothing looks at them any more.
  std::vector<uint32_t> held;
  std::vector<uint32_t> holders;  // by slab: results in it that somebody may still look at
  std::vector<uint32_t> savers;   // by slab: batches that will read it in backward
  // Of a subgraph: by base, the elements from the value of one member to that of the next. Else
  // empty.
  std::vector<int64_t> steps;
  // Of a subgraph, by graph input: where each member's lies, if they need not lie evenly. Else
  // empty.
  std::vector<Regions> scattered;
  // While batches are run (packed_weights.h).
  WeightCopies* copies = nullptr;

  Region region(const Tape& tape, ValueId id) const {
    const Value& value = tape.values[id];
    if (value.is_graph_input())
      return {&tape.graph_inputs[value.index].data, value.offset, value.geometry};
    const Allocation& place = places[value.base];
    return {&slabs[place.slab], place.offset + value.offset, value.geometry};
  }
};

// While one lives, those who run batches on the store find the copies.
class LentWeightCopies {
 public:
  LentWeightCopies(Store& store, WeightCopies* copies) : store_(store) { store_.copies = copies; }
  ~LentWeightCopies() { store_.copies = nullptr; }
  LentWeightCopies(const LentWeightCopies&) = delete;
  LentWeightCopies& operator=(const LentWeightCopies&) = delete;

 private:
  Store& store_;
};

// One call over detached operands, with the graph autograd recorded for it: how backward goes
// through an op that has no rule of ours.
struct LocalGraph {
  std::vector<at::Tensor> inputs;   // by operand; undefined where no gradient is needed
  std::vector<at::Tensor> outputs;  // by result
  std::vector<uint8_t> shared;      // by operand: one for all members (of a batch)
};

// What a batch leaves behind for backward.
struct BatchRecord {
  Signature* signature = nullptr;
  uint32_t first = 0;  // into the flush's node order
  uint32_t count = 0;
  bool needs_grad = false;
  bool leaves_addends = false;  // Rule::addends: a pass of the subgraph adds them
  bool goes_on = false;   // its first members are of a batch that was divided (chunk_batches.h)
  uint32_t consumed = 0;  // members differentiated without retain_graph
  const Rule* rule = nullptr;     // that ran it
  std::vector<uint32_t> saved;    // slabs that its backward may read
  std::vector<LocalGraph> local;  // one for the batch, or one a member (loop)
  std::shared_ptr<void> kept;     // what the rule itself keeps of the batch as a whole

  // What is kept for backward goes; but where nothing is saved it may be differentiated again.
  void drop_kept();
};

// The nodes of a batch's members; of a subgraph's (subgraph.h) the same one for all.
class NodeSpan {
 public:
  NodeSpan(std::span<const NodeId> nodes)  // NOLINT: a batch's members are a span of nodes
      : first_(nodes.data()), size_(nodes.size()), step_(1) {}
  NodeSpan(const NodeId& node, int64_t count)
      : first_(&node), size_(static_cast<size_t>(count)), step_(0) {}

  size_t size() const { return size_; }
  NodeId operator[](size_t m) const { return first_[m * step_]; }

 private:
  const NodeId* first_;
  size_t size_;
  size_t step_;
};

// Common to forward and backward: some members of one batch, and access to their values.
class BatchView {
 public:
  // `rows`: of a subgraph whose one node stands for all members, which rows of the buffers these
  // are; empty: from the first one on.
  BatchView(const Tape& tape, const Store& store, BatchRecord& record, NodeSpan members,
            std::span<const int64_t> rows = {});

  int64_t size() const { return static_cast<int64_t>(members_.size()); }
  const Signature& signature() const { return *record_.signature; }
  const Tape& tape() const { return tape_; }
  WeightCopies* weight_copies() const { return store_.copies; }
  BatchRecord& record() { return record_; }
  bool leaves_addends() const { return record_.leaves_addends; }
  const Node& node(int64_t m) const { return tape_.nodes[members_[m]]; }
  const c10::IValue& argument(size_t i) const { return record_.signature->arguments[i]; }

  // Whether one node stands for all members.
  bool in_subgraph() const { return !store_.steps.empty(); }

  size_t num_operands() const { return node(0).num_operands; }
  ValueId operand(int64_t m, size_t slot) const {
    return tape_.operands[node(m).first_operand + slot];
  }
  const Value& operand_value(int64_t m, size_t slot) const {
    return tape_.values[operand(m, slot)];
  }
  bool given(size_t slot) const { return operand(0, slot) != kNone; }
  const Value& result_value(int64_t m, size_t k) const {
    return tape_.values[node(m).first_value + k];
  }
  // Where member m's `id` lies: one of its operands or results.
  Region region(int64_t m, ValueId id) const {
    if (!in_subgraph()) return store_.region(tape_, id);
    const Value& value = tape_.values[id];
    if (value.is_graph_input() && !store_.scattered.empty()) {
      const Regions& regions = store_.scattered[value.index];
      if (!regions.empty()) return regions[row(m)];
    }
    Region region = store_.region(tape_, id);
    region.offset += row(m) * store_.steps[value.base];
    return region;
  }
  Region operand_region(int64_t m, size_t slot) const { return region(m, operand(m, slot)); }
  Region result_region(int64_t m, size_t k) const {
    return region(m, node(m).first_value + static_cast<ValueId>(k));
  }
  // Whether result k has one geometry in all members.
  bool uniform_result(size_t k) const;

  // Whether the operands have the same sizes in all members.
  bool uniform(size_t slot) const;
  // Whether every member has the very same operand: then it need not be stacked.
  virtual bool shared(size_t slot);
  // The operand of the first member, as it is: [*sizes].
  at::Tensor single(size_t slot);
  // Operands side by side, each of the same sizes: [n, *sizes]. A view where the operands lie
  // evenly spaced in one buffer, else a gathered copy.
  at::Tensor stacked(size_t slot);
  // Operands as rows of `width` elements: [sum of rows, width]. Lengths may differ.
  at::Tensor rows(size_t slot, int64_t width);
  // For elementwise ops: stacked where the results are uniform, else flat.
  at::Tensor elements(size_t slot) { return uniform_result(0) ? stacked(slot) : flat(slot); }
  // All elements of all operands in row-major order: [sum of elements], contiguous.
  at::Tensor flat(size_t slot);
  // As flat, each operand repeated to the number of elements of its member's result 0.
  at::Tensor flat_repeated(size_t slot);

 protected:
  ~BatchView() = default;
  int64_t row(int64_t m) const { return rows_.empty() ? m : rows_[m]; }
  const RegionRows& located(size_t slot);
  static at::Tensor gather(const RegionRows& located);
  at::Tensor repeated_rows(size_t slot, int64_t width, int64_t count);
  const Tape& tape_;
  const Store& store_;
  BatchRecord& record_;
  NodeSpan members_;
  std::span<const int64_t> rows_;
  std::vector<RegionRows> located_;            // by operand; of none until it is asked for
  mutable std::optional<bool> uniform_first_;  // of result 0, once asked for
};

// Forward: operands in, outputs written to the batch's range of the slabs.
class Batch final : public BatchView {
 public:
  using BatchView::BatchView;

  // Output k of all members as one flat tensor over their slab range.
  at::Tensor output(size_t k);
  // The same as [n, *sizes] (uniform results), and as rows of `width` elements.
  at::Tensor output_stacked(size_t k);
  at::Tensor output_rows(size_t k, int64_t width);

  // Whether some member's result needs a gradient: what backward will want is kept then.
  bool needs_grad() const { return record_.needs_grad; }
};

}  // namespace autobatch

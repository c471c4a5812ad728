// The interface through which a rule accesses a batch. Operands and results are gathered when the
// rule requests them. Each value is a range of a slab, which is a flat buffer. A slab contains
// values of one output of a signature. The values are in the order of the schedule, so the results
// of a batch's members are adjacent.
#pragma once

#include "autobatch/common/pooled_memory.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/signature.h"
#include "autobatch/kernels/gather.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace autobatch {

class WeightCopies;

// Where a computed value and its gradient are stored in the memory of a flush.
struct Allocation {
  uint32_t slab = kNone;
  uint32_t grad = kNone;
  int64_t offset = 0;  // elements from the start of the slab
  int64_t grad_offset = 0;
};

// The memory of a flush. A slab exists from the first batch that writes to it until the last batch
// that reads it. If backward of some batches reads the slab, the slab exists until backward of all
// these batches has run (memory_plan.h).
struct Store {
  std::vector<at::Tensor> slabs;    // 1-D; undefined before the first and after the last use
  std::vector<int64_t> lengths;     // by slab: number of elements
  PooledVector<Allocation> places;  // by value; only set for computed results
  std::vector<int64_t> grad_lengths;
  // For each batch to be run: the slabs that are released after the batch.
  std::vector<std::vector<uint32_t>> last_use;
  // Slabs with results that tensors or later nodes refer to. A held slab that no backward reads is
  // released when all tensors that refer to its results have copies. It is also released when
  // nothing refers to its results any more.
  std::vector<uint32_t> held;
  std::vector<uint32_t> holders;  // by slab: number of results in it that may still be referred to
  std::vector<uint32_t> savers;   // by slab: number of batches that will read it in backward
  // In a subgraph, by base: the distance in elements between the values of consecutive members.
  // Outside a subgraph, empty.
  std::vector<int64_t> steps;
  // In a subgraph, by graph input: the region of each member. The regions may be unevenly spaced.
  // Outside a subgraph, empty.
  std::vector<Regions> scattered;
  // The copies of weights that batches use (packed_weights.h). Both pointers are set while batches
  // are run. `kept_copies` contains copies of weights whose changes can be detected, and may be
  // null.
  WeightCopies* copies = nullptr;
  WeightCopies* kept_copies = nullptr;

  Region region(const Tape& tape, ValueId id) const {
    const Value& value = tape.values[id];
    if (value.is_graph_input())
      return {&tape.graph_inputs[value.index].data, value.offset, value.geometry};
    const Allocation& place = places[value.base];
    return {&slabs[place.slab], place.offset + value.offset, value.geometry};
  }
};

// While an object of this class exists, code that runs batches on the store can use the copies of
// weights.
class LentWeightCopies {
 public:
  LentWeightCopies(Store& store, WeightCopies* copies, WeightCopies* kept = nullptr)
      : store_(store) {
    store_.copies = copies;
    store_.kept_copies = kept;
  }
  // Lets `store` use the copies that are lent to the store `of`.
  LentWeightCopies(Store& store, const Store& of)
      : LentWeightCopies(store, of.copies, of.kept_copies) {}
  ~LentWeightCopies() { store_.copies = store_.kept_copies = nullptr; }
  LentWeightCopies(const LentWeightCopies&) = delete;
  LentWeightCopies& operator=(const LentWeightCopies&) = delete;

 private:
  Store& store_;
};

// One call on detached operands, and the autograd graph of the call. Backward of ops without a
// native rule uses this graph.
struct LocalGraph {
  std::vector<at::Tensor> inputs;   // by operand: detached; undefined if it was not given
  std::vector<at::Tensor> outputs;  // by result: its tensor
  std::vector<uint8_t> shared;      // by operand: whether all members of a call use one tensor
};

// The data that a batch keeps for backward.
struct BatchRecord {
  Signature* signature = nullptr;
  uint32_t first = 0;  // index in FlushRecord::order
  uint32_t count = 0;
  bool needs_grad = false;
  // Whether an elementwise program of the subgraph adds the addends (Rule::addends). If so, the
  // rule does not add them.
  bool leaves_addends = false;
  // Whether the first members belong to a divided batch that starts in the previous record
  // (chunk_batches.h). The report counts the divided batch as one batch.
  bool goes_on = false;
  uint32_t consumed = 0;          // number of members whose backward has run without retain_graph
  const Rule* rule = nullptr;     // the rule that ran the batch
  std::vector<uint32_t> saved;    // slabs that the batch's backward may read
  std::vector<LocalGraph> local;  // one graph for the batch, or one for each member (loop)
  std::shared_ptr<void> kept;     // state that the rule keeps for the batch as a whole

  // Releases the data kept for backward. If the rule saves nothing, `kept` is not released, because
  // backward may run again.
  void drop_kept();
};

// The nodes of a batch's members. In a batch of a subgraph (subgraph.h), all members share one
// node.
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

// The common base class of Batch and BackwardBatch. An object represents some members of one batch
// and gives access to their values.
class BatchView {
 public:
  // `rows` is used in a subgraph, where one node represents all members. `rows` contains the rows
  // of the buffers that belong to these members. If `rows` is empty, the rows start at 0.
  BatchView(const Tape& tape, const Store& store, BatchRecord& record, NodeSpan members,
            std::span<const int64_t> rows = {});

  int64_t size() const { return static_cast<int64_t>(members_.size()); }
  const Signature& signature() const { return *record_.signature; }
  const Tape& tape() const { return tape_; }
  const Store& store() const { return store_; }
  // Returns the object that stores copies of a weight. The weight is operand `slot` of member m.
  // Call this function before making a view of the weight, because the function counts the users of
  // the weight's memory.
  WeightCopies* weight_copies(size_t slot, int64_t m = 0) const;
  BatchRecord& record() { return record_; }
  bool leaves_addends() const { return record_.leaves_addends; }
  const Node& node(int64_t m) const { return tape_.nodes[members_[m]]; }
  const c10::IValue& argument(size_t i) const { return record_.signature->arguments[i]; }

  // Whether this is a batch of a subgraph's op. One node then represents all members.
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
  // Returns the region of `id`, an operand or a result of member m.
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
  // Whether result k has the same geometry in all members.
  bool uniform_result(size_t k) const;

  // Whether operand `slot` has the same sizes in all members.
  bool uniform(size_t slot) const;
  // Whether operand `slot` is the same region in all members. If so, the operand need not be
  // stacked.
  virtual bool shared(size_t slot);
  // Returns operand `slot` of the first member: [*sizes].
  at::Tensor single(size_t slot);
  // The functions below return a view if the operands are evenly spaced in one buffer, and
  // otherwise a copy. Later calls return the same copy, so callers must not write to the copy.

  // Returns operand `slot` of all members, stacked: [n, *sizes]. The operands of all members must
  // have the same sizes.
  at::Tensor stacked(size_t slot);
  // Returns operand `slot` of all members as rows of `width` elements, [total number of rows,
  // width]. Members may have different numbers of rows.
  at::Tensor rows(size_t slot, int64_t width);
  // Returns operand `slot` of all members of an elementwise op: stacked if the results are uniform,
  // and flat otherwise.
  at::Tensor elements(size_t slot) { return uniform_result(0) ? stacked(slot) : flat(slot); }
  // Returns operand `slot` of all members as a contiguous 1-D tensor. The elements of each member
  // are in row-major order.
  at::Tensor flat(size_t slot);
  // Like flat, but repeats the operand of each member to the number of elements of the member's
  // result 0.
  at::Tensor flat_repeated(size_t slot);

 protected:
  ~BatchView() = default;
  int64_t row(int64_t m) const { return rows_.empty() ? m : rows_[m]; }
  const RegionRows& located(size_t slot);
  // Returns a contiguous copy of operand `slot` of all members.
  const at::Tensor& gathered(size_t slot);
  at::Tensor repeated_rows(size_t slot, int64_t width, int64_t count);
  const Tape& tape_;
  const Store& store_;
  BatchRecord& record_;
  NodeSpan members_;
  std::span<const int64_t> rows_;
  std::vector<RegionRows> located_;            // by operand; empty until first used
  std::vector<at::Tensor> gathered_;           // by operand: the copy; empty until the first copy
  mutable std::optional<bool> uniform_first_;  // cache of uniform_result(0)
};

// A batch in forward. A rule reads the operands and writes the outputs to the batch's range of the
// slabs.
class Batch final : public BatchView {
 public:
  using BatchView::BatchView;

  // Returns output k of all members as one flat tensor, which is a view of the slab.
  at::Tensor output(size_t k);
  // Return the memory of output k as [n, *sizes] (uniform results only), or as rows of `width`
  // elements.
  at::Tensor output_stacked(size_t k);
  at::Tensor output_rows(size_t k, int64_t width);

  // Whether the result of any member needs a gradient. If so, the rule keeps the values that its
  // backward reads.
  bool needs_grad() const { return record_.needs_grad; }
};

}  // namespace autobatch

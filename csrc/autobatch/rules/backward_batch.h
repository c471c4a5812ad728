// The interface between a rule's backward and the backward pass. A rule gets the members that a
// gradient has reached, and adds the gradients of their operands. Gradients are accumulated in
// place, in flat buffers.
#pragma once

#include "autobatch/rules/batch.h"
#include "autobatch/rules/flush_record.h"

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <optional>

namespace autobatch {

// The batch of cell calls that a subgraph (subgraph.h) computes. The weights of the cell are
// operands of this batch, so the batch accumulates the gradients of the weights.
class Enclosing {
 public:
  // Returns the region that receives the gradient of a graph input that is a weight of the cell.
  virtual Region target(uint32_t graph_input) = 0;
  // Returns the region that receives the gradient of member m's graph input, if the gradient can be
  // added directly. Otherwise returns a region without a buffer.
  virtual Region member_target(uint32_t graph_input, int64_t m) = 0;
  virtual bool is_weight(uint32_t graph_input) const = 0;
  // Returns uninitialized memory, as a 1-D tensor, for the gradients of the value `base` of all
  // members.
  virtual at::Tensor gradient_memory(ValueId base, int64_t length) = 0;
  virtual void add_product(uint32_t graph_input, const WeightGradTerm& product) = 0;
  virtual void check_unwritten() const = 0;
  // Bit k is set if a gradient has reached result k of the subgraph.
  virtual uint8_t reached() const = 0;

 protected:
  ~Enclosing() = default;
};

// Resolves a value to the region of its gradient in the buffers of a backward pass, and marks the
// nodes that a gradient reaches.
class GradAccumulator {
 public:
  GradAccumulator(FlushRecord& record, BackwardTask& task, uint32_t level)
      : record_(record), task_(task), level_(level) {}
  // Creates the accumulator of a subgraph with `count` members. Each gradient buffer then has one
  // row for each member.
  GradAccumulator(FlushRecord& record, BackwardTask& task, Enclosing& enclosing, int64_t count)
      : record_(record), task_(task), level_(0), enclosing_(&enclosing), count_(count) {}

  bool wanted(ValueId id) const;
  // Returns the gradient region of `id` and marks `id` as reached. A new region is filled with
  // zeros.
  Region target(ValueId id) { return resolve(id, record_.cut(id), false); }
  // Like target, but for scatter_add and add_regions, which accept `fresh` regions. The returned
  // region is `fresh` if it is the region of a whole result and nothing has been written to it. The
  // caller must write to the region before any other request for the same value.
  Region target_to_add(ValueId id) { return resolve(id, record_.cut(id), true); }
  // Whether target_to_add would return a `fresh` region.
  bool is_fresh(ValueId id) const;
  // Like target_to_add, but returns a region without a buffer if the gradient of `id` is not
  // needed.
  Region target_if_wanted(ValueId id);
  // Like target, but for the gradient that autograd passes to the held value `id`. If `id` is a
  // view of another held value, the region is in the gradient of the other held value
  // (FlushRecord::cut).
  Region target_behind(ValueId id);
  // Returns the gradient region of a computed result. The region's buffer is an undefined tensor if
  // nothing has been written to the buffer.
  Region gradient(ValueId id) const;
  BackwardTask& task() { return task_; }
  Enclosing* enclosing() { return enclosing_; }
  // Returns the buffer of a computed result's gradient. The buffer contains zeros if no gradient
  // has arrived.
  at::Tensor& buffer(ValueId base);
  // Fills the gradients of the results of these nodes with zeros if no gradient has arrived. Must
  // be called before the gradients are read.
  void complete(std::span<const NodeId> nodes);
  // Marks the value's node as reached. Used if the gradient was not written through target().
  void mark_reached(const Value& value);
  // In a subgraph: if the gradient of `id` is the first in its tile (Partition), returns the region
  // to write the gradient to, and marks `id` as reached. Otherwise returns a region without a
  // buffer.
  Region fresh(ValueId id);
  // In a subgraph, for an operand that is the whole of its base: returns a pointer to the buffer of
  // the operand's gradient, which is still an undefined tensor, and marks `id` as reached. The
  // caller can assign a gradient tensor to the buffer. Returns null if a gradient has already
  // arrived, or if `id` is not such an operand.
  at::Tensor* untouched(ValueId id);
  // Returns a pointer to the buffer of the gradient of a whole graph input. The buffer is still an
  // undefined tensor, and the caller must allocate and fill it. Returns null if a gradient has
  // already arrived, or if `id` is not a whole graph input.
  at::Tensor* untouched_graph_input(ValueId id);
  // Fills the unwritten tiles of `base` with zeros. Must be called before the gradient of `base` is
  // read as a whole.
  void fill_rest(ValueId base);
  // Whether the gradient of `id` is a single contribution and not a sum (Partition::alone).
  bool is_alone(ValueId id) const;
  // Returns the distance in elements between the gradients of consecutive members of a subgraph.
  int64_t step(ValueId id) const;
  // In a subgraph: returns the buffer of the gradient of `base`, a result or a graph input. The
  // buffer is an undefined tensor if no gradient has arrived.
  at::Tensor& gradient_of_base(ValueId base);

 private:
  Region resolve(ValueId id, ValueId cut, bool may_be_fresh);
  Region begin(ValueId id, bool may_be_fresh);
  at::Tensor& export_gradient(uint32_t index);
  // On a device: makes zero-filled gradients, in one call, for all exports of the level that have
  // the dtype and device of `like`.
  void make_export_zeros(const Value& like);
  void clear(ValueId base);
  void fill_before_adding(ValueId id);

  FlushRecord& record_;
  BackwardTask& task_;
  uint32_t level_;
  Enclosing* enclosing_ = nullptr;
  int64_t count_ = 1;
};

// A batch in backward. The members are the nodes that a gradient has reached. The class gives
// access to the operands and results of the members, and to the gradients of the results. The class
// also adds the gradients of the operands.
class BackwardBatch final : public BatchView {
 public:
  BackwardBatch(FlushRecord& flush, BatchRecord& record, NodeSpan members,
                GradAccumulator& accumulator, Level::Half half = Level::Half::kWhole,
                std::span<const int64_t> rows = {});
  // Returns an object for the same batch that contains only the given members.
  BackwardBatch part(std::span<const NodeId> members) {
    return {flush_, record_, members, accumulator_, half_};
  }

  // Whether Rule::backward_chain has been run for the members of this object.
  bool chained() const { return half_ == Level::Half::kRest; }
  // Adds `gradient`, [n, *sizes], to the gradient of result k. If the result is held, the gradient
  // passes through the result's autograd node.
  void add_to_result(size_t k, const at::Tensor& gradient);

  // Whether this object contains all members of the batch. If so, backward need not select rows of
  // the data that forward kept.
  bool complete() const { return members_.size() == record_.count; }
  // Bit k is set if a gradient has reached result k of member m. Bit 7 represents result 7 and all
  // later results.
  uint8_t reached(int64_t m) const { return accumulator_.task().reached[members_[m]]; }
  NodeId member(int64_t m) const { return members_[m]; }
  // For a subgraph only. Bit k is set if a gradient has reached result k of the subgraph.
  uint8_t reached_of_subgraph() const { return accumulator_.enclosing()->reached(); }
  // Returns the position of each member of this object among all members of the batch.
  std::vector<int64_t> positions() const;

  // Raises eager's error if an operand was written to after forward read it. Call this function
  // before operands are read again. If `slot` is given, checks only this operand. If eager saves
  // the operand only for some instances, call this function immediately before the operand is read.
  void check_unwritten(std::optional<size_t> slot = std::nullopt) const;

  // Return result k of all members: stacked, as rows, or flat. Result k may be a hidden result.
  at::Tensor result_stacked(size_t k) { return stacked_of(located_results(k)); }
  at::Tensor result_rows(size_t k, int64_t width) { return rows_of(located_results(k), width); }
  at::Tensor result_flat(size_t k) { return flat_of(located_results(k)); }
  // Return the gradients of result k of all members. A gradient that has not arrived is returned as
  // zeros.
  at::Tensor grad_stacked(size_t k) { return stacked_of(located_gradients(k)); }
  at::Tensor grad_rows(size_t k, int64_t width) { return rows_of(located_gradients(k), width); }
  at::Tensor grad_flat(size_t k) { return flat_of(located_gradients(k)); }

  // Whether operand `slot` is the same region in all members, and its gradients are added to the
  // same region. A detached operand and the original tensor share memory, but have separate
  // gradients.
  bool shared(size_t slot) override;
  // Whether operand `slot` of any member needs a gradient.
  bool needs(size_t slot);

  // Adds `gradient` to the gradients of operand `slot`. Its shape is [n, *sizes], or any other
  // shape with the same elements in the same order. A gradient tensor without other owners may
  // become the gradient's buffer, without a copy.
  void add(size_t slot, const at::Tensor& gradient);
  void add(size_t slot, at::Tensor&& gradient);
  // Calls `compute` with a tensor of shape `sizes`. `compute` must write the gradients of operand
  // `slot` to this tensor. The tensor has the elements of [n, *operand sizes] in the same order. If
  // the gradient is the first one and the members' regions are adjacent, the tensor is the final
  // memory of the gradient. Otherwise the tensor is temporary and is added to the gradient.
  void add_computed(size_t slot, at::IntArrayRef sizes,
                    c10::function_ref<void(at::Tensor&)> compute);
  // Returns the memory for the gradients of operand `slot`, [n, *sizes], if these gradients are the
  // first ones and the members' regions are adjacent. Otherwise returns an undefined tensor, and
  // the caller must call `add`. The caller must fill the whole returned tensor.
  at::Tensor fresh(size_t slot);
  // Like `add`, for an op whose operand gets the unchanged gradient of a result. The gradients of
  // the operand and of the result may then share memory.
  void pass_on(size_t slot, const at::Tensor& gradient);
  // For a shared operand: adds a gradient [*sizes] that the caller has summed over the members.
  void add_single(size_t slot, const at::Tensor& gradient);
  // For a shared operand: adds left^T right, or the sum of the rows of `left` (WeightGradTerm), to
  // the operand's gradient. If the operand is a graph input, such products are collected until they
  // have enough rows for one GEMM, or until run_levels ends.
  void add_product(size_t slot, const at::Tensor& left, const at::Tensor& right);

  // For an operand that forward repeated to the size of the result: sums the gradients of an
  // operand's repetitions and adds the sum to the gradient of the operand.
  void add_repeated(size_t slot, const at::Tensor& gradient);
  // Adds `rows` to the gradient of a shared matrix in which forward looked up rows. The parameters
  // are those of index_add_rows.
  void add_rows(size_t slot, const at::Tensor& indices, const at::Tensor& rows, int64_t skip,
                at::IntArrayRef times = {});

  // --- regions, for rules that copy parts of values ---
  bool wanted(ValueId id) const { return accumulator_.wanted(id); }
  Region target(int64_t m, ValueId id) {
    if (!in_subgraph()) return accumulator_.target(id);
    const Value& value = tape_.values[id];
    if (value.is_graph_input()) {
      const Region there = accumulator_.enclosing()->member_target(value.index, m);
      if (there.buffer != nullptr) return there;
    }
    Region region = accumulator_.target(id);
    region.offset += m * accumulator_.step(id);
    return region;
  }
  // See GradAccumulator::target_to_add.
  Region target_to_add(int64_t m, ValueId id) {
    return in_subgraph() ? target(m, id) : accumulator_.target_to_add(id);
  }
  Region grad_region(int64_t m, size_t k) {
    const ValueId id = node(m).first_value + static_cast<ValueId>(k);
    Region region = accumulator_.gradient(id);
    if (in_subgraph()) region.offset += m * accumulator_.step(id);
    return region;
  }

  // --- one member at a time, for batches that ran as a loop ---
  const LocalGraph& member_local(int64_t m);
  at::Tensor member_grad(int64_t m, size_t k);
  void member_add(int64_t m, size_t slot, const at::Tensor& gradient);

 private:
  at::Tensor fresh_run(size_t slot);
  at::Tensor fresh_side_by_side(size_t slot);
  at::Tensor* untouched(size_t slot, int64_t numel, c10::ScalarType dtype);
  at::Tensor* untouched_of_all(size_t slot, int64_t numel, c10::ScalarType dtype);
  bool lies_evenly(size_t k) const;
  template <class RegionOf>
  RegionRows located(bool even, int64_t step, const RegionOf& region_of);
  RegionRows located_results(size_t k);
  bool has_even_gradients(size_t k) const;
  RegionRows located_gradients(size_t k);
  RegionRows targets(size_t slot, bool& all);
  static at::Tensor rows_of(const RegionRows& located, int64_t width);

  FlushRecord& flush_;
  GradAccumulator& accumulator_;
  Level::Half half_;
};

}  // namespace autobatch

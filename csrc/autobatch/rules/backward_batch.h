// What a rule's backward sees: the members that a gradient has reached, and where the gradients of
// their operands belong. Gradients are accumulated in place into one flat buffer a slab.
#pragma once

#include "autobatch/rules/batch.h"
#include "autobatch/rules/flush_record.h"

#include <cstdint>

namespace autobatch {

// Of a subgraph (subgraph.h): the batch that it is run for, which has its weights' gradients.
class Enclosing {
 public:
  // The gradient of a graph input that is a weight.
  virtual Region target(uint32_t graph_input) = 0;
  // Where the gradient of member m's belongs, if it can be added there at once; else no buffer.
  virtual Region member_target(uint32_t graph_input, int64_t m) = 0;
  virtual bool is_weight(uint32_t graph_input) const = 0;
  // For the gradient of a value of all members: 1-D, uninitialized.
  virtual at::Tensor gradient_memory(ValueId base, int64_t length) = 0;
  virtual void add_product(uint32_t graph_input, const WeightGradTerm& product) = 0;
  virtual void check_unwritten() const = 0;
  // Which of the subgraph's results a gradient has come to: bit k.
  virtual uint8_t reached() const = 0;

 protected:
  ~Enclosing() = default;
};

// Where gradients go: resolves a value to its region in the task's buffers, and notes what was
// reached.
class GradAccumulator {
 public:
  GradAccumulator(FlushRecord& record, BackwardTask& task, uint32_t level)
      : record_(record), task_(task), level_(level) {}
  // Of a subgraph, for so many members: buffers have a row for each.
  GradAccumulator(FlushRecord& record, BackwardTask& task, Enclosing& enclosing, int64_t count)
      : record_(record), task_(task), level_(0), enclosing_(&enclosing), count_(count) {}

  bool wanted(ValueId id) const;
  // The gradient region of `id`, zero-filled if new. Marks it reached.
  Region target(ValueId id) { return resolve(id, record_.cut(id), false); }
  // The same for scatter_add and add_regions: one of a whole result that is new is `fresh`. They
  // must follow before anything else asks for it.
  Region target_to_add(ValueId id) { return resolve(id, record_.cut(id), true); }
  // Whether that would be `fresh`.
  bool is_fresh(ValueId id) const;
  // The same, or no buffer where no gradient is wanted.
  Region target_if_wanted(ValueId id);
  // As target, but past a cut at `id` itself: for the gradient that arrives at a held value.
  Region target_behind(ValueId id);
  // The gradient of a computed result, or an undefined buffer if nothing has touched its slab.
  Region gradient(ValueId id) const;
  BackwardTask& task() { return task_; }
  Enclosing* enclosing() { return enclosing_; }
  // The buffer for the gradient of a computed result; zeros if nothing has arrived.
  at::Tensor& buffer(ValueId base);
  // Before the gradients of these nodes' results are read: zeros where nothing has arrived.
  void complete(std::span<const NodeId> nodes);
  // That a gradient has reached it: it is in a buffer that was not asked for by target().
  void mark_reached(const Value& value);
  // Of a subgraph: where the gradient of `id` is to be written, if it is the first in a tile; else
  // no buffer. Marks it reached.
  Region fresh(ValueId id);
  // Of a subgraph: the buffer of the gradient of an operand that is all of its base, where nothing
  // has arrived yet, for a gradient to become it; else null. Marks it reached.
  at::Tensor* untouched(ValueId id);
  // The buffer of the gradient of a graph input as a whole, where nothing has arrived yet, for
  // the caller to make and fill; else null.
  at::Tensor* untouched_graph_input(ValueId id);
  // Zeros in the tiles of `base` that nothing was written to: before it is read as a whole.
  void fill_rest(ValueId base);
  // Whether nothing else will be added to the gradient of `id`.
  bool is_alone(ValueId id) const;
  // The elements from the gradient of one member of a subgraph to that of the next.
  int64_t step(ValueId id) const;
  // Of a subgraph: the buffer of a result's gradient or an operand's; undefined if nothing arrived.
  at::Tensor& gradient_of_base(ValueId base);

 private:
  Region resolve(ValueId id, ValueId cut, bool may_be_fresh);
  Region begin(ValueId id, bool may_be_fresh);
  at::Tensor& export_gradient(uint32_t index);
  // On a device: for all exports of the level of this dtype, by one call.
  void make_export_zeros(const Value& like);
  void clear(ValueId base);
  void fill_before_adding(ValueId id);

  FlushRecord& record_;
  BackwardTask& task_;
  uint32_t level_;
  Enclosing* enclosing_ = nullptr;
  int64_t count_ = 1;
};

// What a rule's backward sees: the members that were reached, their operands, results and the
// results' gradients; and where to add the operands' gradients.
class BackwardBatch final : public BatchView {
 public:
  BackwardBatch(FlushRecord& flush, BatchRecord& record, NodeSpan members,
                GradAccumulator& accumulator, Level::Half half = Level::Half::kWhole,
                std::span<const int64_t> rows = {});
  // The same for some of the members.
  BackwardBatch part(std::span<const NodeId> members) {
    return {flush_, record_, members, accumulator_, half_};
  }

  // Whether Rule::backward_chain has been run for these members.
  bool chained() const { return half_ == Level::Half::kRest; }
  // Adds to the gradient of result k, [n, *sizes], at its autograd node if it is held.
  void add_to_result(size_t k, const at::Tensor& gradient);

  // Whether these are all members of the batch: then what forward kept can be used as it is.
  bool complete() const { return members_.size() == record_.count; }
  // Which results of member m a gradient has reached: bit k of result k, the last one of all later.
  uint8_t reached(int64_t m) const { return accumulator_.task().reached[members_[m]]; }
  NodeId member(int64_t m) const { return members_[m]; }
  // In a subgraph: which of its results a gradient has come to.
  uint8_t reached_of_subgraph() const { return accumulator_.enclosing()->reached(); }
  // Where these stand among all members.
  std::vector<int64_t> positions() const;

  // Raises eager's error if an operand is no longer what forward read: before it is read again.
  void check_unwritten() const;
  // The same of one operand that is read now, for what eager may save of longer instances only.
  void check_unwritten(size_t slot) const;

  // Results, hidden ones too.
  at::Tensor result_stacked(size_t k) { return stacked_of(located_results(k)); }
  at::Tensor result_rows(size_t k, int64_t width) { return rows_of(located_results(k), width); }
  at::Tensor result_flat(size_t k) { return flat_of(located_results(k)); }
  // Gradients of results; zeros where nothing arrived.
  at::Tensor grad_stacked(size_t k) { return stacked_of(located_gradients(k)); }
  at::Tensor grad_rows(size_t k, int64_t width) { return rows_of(located_gradients(k), width); }
  at::Tensor grad_flat(size_t k) { return flat_of(located_gradients(k)); }

  // As in forward, and the gradient goes to the same place for every member: one that was
  // detached shares the memory but not the gradient.
  bool shared(size_t slot) override;
  // Whether any member's operand wants a gradient.
  bool needs(size_t slot);

  // Adds [n, *sizes], or any shape of the same elements in the same order. A gradient that nobody
  // else holds may become the buffer itself.
  void add(size_t slot, const at::Tensor& gradient);
  void add(size_t slot, at::Tensor&& gradient);
  // Where to write the gradient, [n, *sizes], if it is the first one there and the members' lie
  // side by side; else undefined: it has to be added. What this gives must be filled.
  at::Tensor fresh(size_t slot);
  // As add, of the gradient of a result as it is, which the operand's may share memory with.
  void pass_on(size_t slot, const at::Tensor& gradient);
  // For a shared operand: adds [*sizes], summed over the members by the caller.
  void add_single(size_t slot, const at::Tensor& gradient);
  // For a shared operand: adds left^T right, or the row sum of left; see WeightGradTerm. Deferred
  // to the end of the backward pass if the operand is a graph input.
  void add_product(size_t slot, const at::Tensor& left, const at::Tensor& right);

  // Operands that were repeated to their result's number of elements: sums the repetitions.
  void add_repeated(size_t slot, const at::Tensor& gradient);
  // For a shared matrix looked up by row: index_add_rows.
  void add_rows(size_t slot, const at::Tensor& indices, const at::Tensor& rows, int64_t skip,
                at::IntArrayRef times = {});

  // --- regions, for rules that copy pieces ---
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
  // GradAccumulator::target_to_add.
  Region target_to_add(int64_t m, ValueId id) {
    return in_subgraph() ? target(m, id) : accumulator_.target_to_add(id);
  }
  Region grad_region(int64_t m, size_t k) {
    const ValueId id = node(m).first_value + static_cast<ValueId>(k);
    Region region = accumulator_.gradient(id);
    if (in_subgraph()) region.offset += m * accumulator_.step(id);
    return region;
  }

  // --- one member at a time, for what a loop ran ---
  const LocalGraph& member_local(int64_t m);
  at::Tensor member_grad(int64_t m, size_t k);
  void member_add(int64_t m, size_t slot, const at::Tensor& gradient);

 private:
  at::Tensor fresh_side_by_side(size_t slot);
  at::Tensor* untouched(size_t slot, const at::Tensor& gradient);
  at::Tensor* untouched_of_all(size_t slot, const at::Tensor& gradient);
  bool lies_evenly(size_t k) const;
  template <class RegionOf>
  RegionRows located(bool even, int64_t step, const RegionOf& region_of);
  RegionRows located_results(size_t k);
  bool has_even_gradients(size_t k) const;
  RegionRows located_gradients(size_t k);
  RegionRows targets(size_t slot, bool& all);
  static at::Tensor stacked_of(const RegionRows& located);
  static at::Tensor rows_of(const RegionRows& located, int64_t width);
  static at::Tensor flat_of(const RegionRows& located);

  FlushRecord& flush_;
  GradAccumulator& accumulator_;
  Level::Half half_;
};

}  // namespace autobatch

#include "autobatch/subgraph/subgraph.h"

#include "autobatch/common/pool.h"
#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/kernels/packed_weights.h"
#include "autobatch/rules/rowwise.h"
#include "autobatch/subgraph/elementwise_fusion.h"
#include "autobatch/subgraph/factor_buffers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace autobatch {

namespace {

// --- one batch of calls ---

// The data of a batch that backward needs: the subgraph's values for all members.
struct SubgraphRun {
  SubgraphRun(const Subgraph& subgraph, int64_t members, bool needs_gradient) : count(members) {
    record.tape = subgraph.tape;
    record.store = subgraph.store;
    record.batches.reserve(subgraph.tape.nodes.size());
    for (NodeId n = 0; n < subgraph.tape.nodes.size(); ++n) {
      const Node& node = subgraph.tape.nodes[n];
      record.order.push_back(n);
      BatchRecord& batch = record.batches.emplace_back();
      batch.signature = node.signature;
      batch.rule = node.signature->rule;
      batch.first = n;
      batch.count = static_cast<uint32_t>(members);
      batch.needs_grad = needs_gradient && subgraph.tape.needs_grad(node);
      batch.leaves_addends = subgraph.leaves_addends[n] != 0;
    }
  }

  FlushRecord record;
  int64_t count;
  RowRange range;  // the members' rows among the rows of all batches of the flush
};

// Whether the data of each member is row-major. The shape of `stacked` is [n, *sizes], and the
// shape of a member is [*sizes].
bool has_dense_members(const at::Tensor& stacked) {
  int64_t expected = 1;
  for (int64_t d = stacked.dim() - 1; d > 0; --d) {
    if (stacked.size(d) != 1 && stacked.stride(d) != expected) return false;
    expected *= stacked.size(d);
  }
  return true;
}

class Forward {
 public:
  Forward(const Subgraph& subgraph, FactorBuffers& rows, Batch& batch)
      : subgraph_(subgraph),
        rows_(rows),
        batch_(batch),
        run_(std::make_shared<SubgraphRun>(subgraph, batch.size(), batch.needs_grad())),
        record_(run_->record) {
    find_range();
  }

  void run() {
    const LentWeightCopies lent(record_.store, batch_.store());
    record_.store.scattered.resize(record_.tape.graph_inputs.size());
    bind_operands();
    for (size_t s = 0; s < subgraph_.steps.size(); ++s) run_step(s);
    if (!batch_.needs_grad()) return;
    record_.store.scattered.clear();
    for (size_t i = 0; i < record_.tape.graph_inputs.size(); ++i) {
      if (!subgraph_.operand_saved[i]) record_.tape.graph_inputs[i].data = at::Tensor();
    }
    batch_.record().kept = run_;
  }

 private:
  // Computes `range` from the position of the members' results in the slab of their signature.
  void find_range() {
    const Region first = batch_.result_region(0, 0);
    const int64_t extent = first.geometry->extent;
    run_->range = {run_->count, 0, run_->count};
    if (extent == 0 || first.offset % extent != 0) return;
    run_->range.total = first.buffer->numel() / extent;
    run_->range.before = first.offset / extent;
  }

  void bind_operands() {
    for (size_t i = 0; i < record_.tape.graph_inputs.size(); ++i) {
      GraphInput& graph_input = record_.tape.graph_inputs[i];
      if (subgraph_.is_weight[i]) {
        bind_weight(i, graph_input);
        continue;
      }
      if (subgraph_.is_copied[i]) {
        scatter(i);
        continue;
      }
      graph_input.data = batch_.stacked(i);
      // Two members may read different views of the same memory. Each view that the user holds has
      // a separate gradient, so the data is copied for each member.
      const bool separate = graph_input.data.stride(0) != 0 || one_value(batch_, i);
      if (!separate || !has_dense_members(graph_input.data))
        graph_input.data = graph_input.data.contiguous();
      record_.store.steps[graph_input.value] = batch_.size() == 1 ? 0 : graph_input.data.stride(0);
    }
  }

  void bind_weight(size_t i, GraphInput& to) {
    to.data = region_view(batch_.operand_region(0, i));
    const Value& value = batch_.operand_value(0, i);
    to.counted = value.is_graph_input();
    if (!to.counted) return;
    const GraphInput& from = batch_.tape().graph_inputs[value.index];
    to.counter = from.counter;
    to.version = from.version;
    to.counted = from.counted && !from.is_copy;
  }

  // Stores the memory regions of operand `i` for the rules, and copies no data.
  void scatter(size_t i) {
    Regions& regions = record_.store.scattered[i];
    regions.reserve(static_cast<size_t>(batch_.size()));
    for (int64_t m = 0; m < batch_.size(); ++m) regions.push_back(batch_.operand_region(m, i));
  }

  void run_step(size_t s) {
    const SubgraphStep& step = subgraph_.steps[s];
    step.each_node([&](NodeId n) {
      const Node& node = record_.tape.nodes[n];
      for (uint32_t k = 0; k < node.num_values; ++k) make_slab(node.first_value + k);
    });
    if (step.fused.empty()) {
      run_node(step.node);
    } else {
      const ProfilerRange range([&] { return name_of_fused(record_.tape, step, run_->count); });
      run_fused(subgraph_, step, record_, run_->count);
    }
    for (const uint32_t slab : subgraph_.drop_after[s]) record_.store.slabs[slab] = at::Tensor();
  }

  void run_node(NodeId n) {
    BatchRecord& batch = record_.batches[n];
    const Node& node = record_.tape.nodes[n];
    const ProfilerRange range([&] { return name_of_batch(record_.tape, node, run_->count); });
    Batch view(record_.tape, record_.store, batch, NodeSpan(record_.order[n], run_->count));
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (batch.rule->below_autograd()) below.emplace();
    batch.rule->forward(view);
  }

  // Allocates memory for the value. A result of the cell needs no slab, because it is written
  // directly to the output of the batch.
  void make_slab(ValueId id) {
    const auto result = std::find(subgraph_.results.begin(), subgraph_.results.end(), id);
    const uint32_t number = record_.store.places[id].slab;
    if (subgraph_.passing[number] != 0) return;
    at::Tensor& slab = record_.store.slabs[number];
    if (slab.defined()) return;  // the value shares the slab of an earlier value
    if (result != subgraph_.results.end()) {
      slab = batch_.output(static_cast<size_t>(result - subgraph_.results.begin()));
      return;
    }
    const at::TensorOptions options = record_.tape.values[id].options();
    const int64_t length = record_.store.lengths[number];
    if (subgraph_.is_factor[number] != 0 && subgraph_.slab_saved[number] != 0 &&
        batch_.needs_grad()) {
      slab = rows_.take(&batch_.tape(), false, number, run_->range, length, options);
    } else {
      slab = pooled_empty(length * run_->count, options);
    }
  }

  const Subgraph& subgraph_;
  FactorBuffers& rows_;
  Batch& batch_;
  std::shared_ptr<SubgraphRun> run_;
  FlushRecord& record_;
};

// Runs the backward of members whose gradients have reached the same results.
class Backward final : public Enclosing {
 public:
  Backward(const Subgraph& subgraph, FactorBuffers& joined, SubgraphRun& run, BackwardBatch& batch)
      : subgraph_(subgraph), joined_(joined), run_(run), record_(run.record), batch_(batch) {
    if (!batch.complete()) rows_ = batch.positions();
  }

  void run() {
    const LentWeightCopies lent(record_.store, batch_.store());
    GradAccumulator accumulator(record_, task_, *this, batch_.size());
    task_.grads.resize(record_.store.grad_lengths.size());
    task_.reached.resize(record_.tape.nodes.size(), 0);
    task_.graph_input_grads.resize(record_.tape.graph_inputs.size());
    task_.partition = &subgraph_.partition;
    task_.unwritten.resize(record_.tape.values.size(), 0);
    for (size_t i = 0; i < record_.tape.graph_inputs.size(); ++i) {
      task_.graph_input_wanted.push_back(batch_.needs(i) ? 1 : 0);
      added_at_once_.push_back(subgraph_.is_copied[i] && all_wanted(i) ? 1 : 0);
    }
    seed(accumulator);
    for (auto step = subgraph_.steps.rbegin(); step != subgraph_.steps.rend(); ++step) {
      run_step(*step, accumulator);
    }
    for (size_t i = 0; i < task_.graph_input_grads.size(); ++i) {
      if (!task_.graph_input_grads[i].defined()) continue;
      accumulator.fill_rest(record_.tape.graph_inputs[i].value);
      batch_.add(i, std::move(task_.graph_input_grads[i]));
    }
  }

  Region target(uint32_t graph_input) override {
    return batch_.target(0, batch_.operand(0, graph_input));
  }
  Region member_target(uint32_t graph_input, int64_t m) override {
    if (!added_at_once_[graph_input]) return {};
    return batch_.target_to_add(m, batch_.operand(m, graph_input));
  }
  bool is_weight(uint32_t graph_input) const override {
    return subgraph_.is_weight[graph_input] != 0;
  }
  at::Tensor gradient_memory(ValueId base, int64_t length) override {
    const Value& value = record_.tape.values[base];
    const bool computed = !value.is_graph_input() && rows_.empty();
    const uint32_t number = computed ? record_.store.places[base].grad : 0;
    if (!computed || subgraph_.is_grad_factor[number] == 0) {
      return pooled_empty(length, value.options());
    }
    return joined_.take(&batch_.tape(), true, number, run_.range, value.geometry->extent,
                        value.options());
  }
  void add_product(uint32_t graph_input, const WeightGradTerm& p) override {
    batch_.add_product(graph_input, p.left, p.right);
  }
  void check_unwritten() const override { batch_.check_unwritten(); }
  uint8_t reached() const override { return batch_.reached(0); }

 private:
  bool all_wanted(size_t i) const {
    for (int64_t m = 0; m < batch_.size(); ++m) {
      if (!batch_.wanted(batch_.operand(m, i))) return false;
    }
    return true;
  }

  // Puts the gradients of the cell's results into the task. The gradients are not copied: the task
  // uses the gradient buffers of the batch, which no other code reads afterwards.
  void seed(GradAccumulator& accumulator) {
    for (size_t k = 0; k < subgraph_.results.size(); ++k) {
      if ((batch_.reached(0) >> k & 1) == 0) continue;
      task_.grads[record_.store.places[subgraph_.results[k]].grad] = batch_.grad_flat(k);
      accumulator.mark_reached(record_.tape.values[subgraph_.results[k]]);
    }
  }

  void run_step(const SubgraphStep& step, GradAccumulator& accumulator) {
    if (step.fused.empty()) return run_node(step.node, accumulator);
    const int64_t first = rows_.empty() ? 0 : rows_.front();
    if (!rows_.empty() && rows_.back() - first + 1 != batch_.size()) {
      // The rows are not consecutive, so the rule of each op runs its backward.
      for (auto part = step.fused.rbegin(); part != step.fused.rend(); ++part) {
        run_node(part->node, accumulator);
      }
      return;
    }
    const ProfilerRange range(
        [&] { return name_of_fused(record_.tape, step, batch_.size()) + ", backward"; });
    run_fused_backward(step, record_, accumulator, {first, batch_.size()});
  }

  void run_node(NodeId n, GradAccumulator& accumulator) {
    BatchRecord& batch = record_.batches[n];
    const Node& node = record_.tape.nodes[n];
    if (task_.reached[n] != 0 && batch.needs_grad) {
      for (uint32_t k = 0; k < node.num_values; ++k) accumulator.fill_rest(node.first_value + k);
      const ProfilerRange range([&] {
        return name_of_batch(record_.tape, node, static_cast<size_t>(batch_.size())) + ", backward";
      });
      BackwardBatch view(record_, batch, NodeSpan(record_.order[n], batch_.size()), accumulator,
                         Level::Half::kWhole, rows_);
      std::optional<at::AutoDispatchBelowADInplaceOrView> below;
      if (batch.rule->below_autograd()) below.emplace();
      batch.rule->backward(view);
    }
    for (uint32_t k = 0; k < node.num_values; ++k) {
      task_.grads[record_.store.places[node.first_value + k].grad] = at::Tensor();
    }
  }

  const Subgraph& subgraph_;
  FactorBuffers& joined_;
  SubgraphRun& run_;
  FlushRecord& record_;
  BackwardBatch& batch_;
  BackwardTask task_;
  std::vector<int64_t> rows_;
  std::vector<uint8_t> added_at_once_;  // for each operand: whether member_target() is used
};

class SubgraphRule final : public Rule {
 public:
  explicit SubgraphRule(Subgraph subgraph) : subgraph_(std::move(subgraph)) {}

  bool capture(NodeBuilder&) const override { return false; }  // subgraphs are made from nodes
  void forward(Batch& batch) const override { Forward(subgraph_, rows_, batch).run(); }

  void backward(BackwardBatch& batch) const override {
    // Raises the error for a second backward. If an op keeps values that eager mode does not keep,
    // earlier checks do not raise this error.
    if (batch.record().kept == nullptr) raise_consumed("a cell");
    auto& run = *static_cast<SubgraphRun*>(batch.record().kept.get());
    bool alike = true;
    for (int64_t m = 1; m < batch.size(); ++m) alike &= batch.reached(m) == batch.reached(0);
    if (alike) return Backward(subgraph_, rows_, run, batch).run();
    std::vector<std::vector<NodeId>> groups(256);
    for (int64_t m = 0; m < batch.size(); ++m) groups[batch.reached(m)].push_back(batch.member(m));
    for (const std::vector<NodeId>& members : groups) {
      if (members.empty()) continue;
      BackwardBatch part = batch.part(members);
      Backward(subgraph_, rows_, run, part).run();
    }
  }

  // Runs the ops one after the other, on one member.
  std::vector<at::Tensor> eager(const Signature&, at::ArrayRef<at::Tensor> operands,
                                at::ArrayRef<at::Tensor>) const override {
    const Tape& tape = subgraph_.ops();
    std::vector<at::Tensor> values(tape.values.size());
    for (size_t i = 0; i < operands.size(); ++i) values[tape.graph_inputs[i].value] = operands[i];
    const auto read = [&](ValueId id) {
      if (id == kNone) return at::Tensor();
      const Value& value = tape.values[id];
      const at::Tensor& base = values[value.base];
      at::Tensor out = base;
      if (value.parent != kNone) {
        out = base.as_strided(value.geometry->sizes, value.geometry->strides,
                              base.storage_offset() + value.offset);
      }
      return value.requires_grad ? out : out.detach();
    };
    for (const Node& node : tape.nodes) {
      std::vector<at::Tensor> inputs, places;
      for (ValueId id : tape.operands_of(node)) inputs.push_back(read(id));
      for (uint32_t k = 0; k < node.num_values; ++k) {
        const Value& value = tape.values[node.first_value + k];
        places.push_back(
            at::empty_strided(value.geometry->sizes, value.geometry->strides, value.options()));
      }
      const auto results = node.signature->rule->eager(*node.signature, inputs, places);
      for (size_t k = 0; k < results.size(); ++k) values[node.first_value + k] = results[k];
    }
    std::vector<at::Tensor> out;
    for (ValueId id : subgraph_.results) out.push_back(values[id]);
    return out;
  }

  bool heavy() const override { return subgraph_.heavy; }
  bool below_autograd() const override { return false; }  // the rules of some ops use autograd
  bool saves() const override { return subgraph_.saves; }
  bool reads(size_t slot) const override { return subgraph_.operand_saved[slot] != 0; }
  bool reads_result(uint32_t k) const override {
    return subgraph_.slab_saved[subgraph_.store.places[subgraph_.results[k]].slab] != 0;
  }
  bool depends(uint32_t k, size_t slot) const override {
    return (subgraph_.depends[k] >> slot & 1) != 0;
  }
  const Subgraph* subgraph() const override { return &subgraph_; }

 private:
  Subgraph subgraph_;
  mutable FactorBuffers rows_;
};

}  // namespace

std::shared_ptr<const Rule> make_subgraph_rule(Subgraph subgraph) {
  subgraph.complete();
  return std::make_shared<SubgraphRule>(std::move(subgraph));
}

}  // namespace autobatch

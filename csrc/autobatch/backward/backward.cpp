#include "autobatch/backward/backward.h"

#include "autobatch/backward/consumed_nodes.h"
#include "autobatch/backward/overwrites.h"
#include "autobatch/backward/recompute.h"
#include "autobatch/backward/saved_tensor_check.h"
#include "autobatch/debug/trace.h"
#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/kernels/packed_weights.h"
#include "autobatch/kernels/region_kinds.h"
#include "autobatch/rules/rule.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <optional>

namespace autobatch {

BackwardTask::BackwardTask() = default;
BackwardTask::~BackwardTask() = default;

void check_computable(const FlushRecord& record, NodeId node) {
  const Node& n = record.tape.nodes[node];
  check_not_consumed(record, node);
  for (uint32_t slot = 0; slot < n.num_operands; ++slot) {
    const ValueId operand = record.tape.operands[n.first_operand + slot];
    if (operand == kNone) continue;
    const Value& base = record.tape.values[record.tape.values[operand].base];
    if (!base.is_graph_input()) continue;
    const GraphInput& graph_input = record.tape.graph_inputs[base.index];
    if (!graph_input.counted || graph_input.counter.current_version() == graph_input.version)
      continue;
    // If the old content is kept and eager mode does not save the tensor, the node can run again.
    if (graph_input.as_read.defined() && !saves_operand(record.tape, n, slot)) continue;
    TORCH_CHECK(false,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: [",
                c10::toString(base.dtype), " ", at::IntArrayRef(base.geometry->sizes),
                "], read by ", n.signature->op->name,
                " in a batch() block, was modified after this read; with create_graph=True, the "
                "block's ops are computed again and need the old value.");
  }
}

namespace {

// Calls `visit` for each gradient buffer (Allocation::grad) of the results of the part.
template <class Visit>
void for_each_gradient(const FlushRecord& record, const Level::Part& part, const Visit& visit) {
  for (uint32_t i = 0;; i = part.other) {
    const Node& node = record.tape.nodes[record.level_order[part.first + i]];
    for (uint32_t k = 0; k < node.num_values; ++k)
      visit(record.store.places[node.first_value + k].grad);
    if (i == part.other) return;
  }
}

// Frees gradient buffers that will not be read again. Must be called after each part, even if no
// node of the part had to run. (If a level runs again for gradients that arrived late, the buffers
// are kept, because the second run must start from zeros.)
void drop_gradients(const FlushRecord& record, BackwardTask& task, const Level::Part& part) {
  if (task.reopened) return;
  for_each_gradient(record, part, [&](uint32_t grad) {
    if (--task.parts_left[grad] == 0) task.grads[grad] = at::Tensor();
  });
}

// Frees the data that finished batches kept for backward, unless this level may run again. If every
// feeder of this level and of higher levels has run in this pass, the level cannot run again.
void drop_saved(FlushRecord& record, BackwardTask& task, uint32_t level) {
  const auto& left = task.feeders_left;
  if (std::any_of(left.begin() + level, left.end(), [](uint32_t n) { return n != 0; })) return;
  if (task.replay != nullptr || record.tasks.size() != 1) return;
  for (const uint32_t b : task.finished) {
    BatchRecord& batch = record.batches[b];
    batch.drop_kept();
    for (const uint32_t slab : batch.saved) {
      if (--record.store.savers[slab] == 0) record.free_slab(slab);
    }
    batch.saved.clear();
  }
  task.finished.clear();
}

}  // namespace

std::unique_ptr<BackwardTask> make_task(const FlushRecord& record, std::vector<uint8_t> wanted) {
  auto task = std::make_unique<BackwardTask>();
  task->grads.resize(record.store.grad_lengths.size());
  task->graph_input_grads.resize(record.tape.graph_inputs.size());
  task->begun.resize(record.tape.values.size(), 0);
  task->reached.resize(record.tape.nodes.size(), 0);
  task->export_grads.resize(record.exports.size());
  task->level_done.resize(record.levels.size(), 0);
  task->level_waits.resize(record.levels.size(), 0);
  task->consumed.resize(record.tape.nodes.size(), 0);
  task->parts_left.resize(task->grads.size(), 0);
  for (const Level& level : record.levels) {
    for (const Level::Part& part : level.parts) {
      for_each_gradient(record, part, [&](uint32_t grad) { ++task->parts_left[grad]; });
    }
  }
  task->graph_input_wanted = std::move(wanted);
  auto written = std::make_unique<Written>(record);
  if (!written->none()) task->written = std::move(written);
  task->any_kept = std::ranges::any_of(record.tape.graph_inputs, [](const GraphInput& graph_input) {
    return graph_input.as_read.defined();
  });
  task->unseen = find_unseen_writes(record);
  return task;
}

namespace {

// Resets the levels up to `level`, so that they can run again for the gradients that arrive later.
void reopen_levels(FlushRecord& record, BackwardTask& task, uint32_t level) {
  task.reopened = true;
  task.finished.clear();  // a finished batch may run again
  for (uint32_t l = 0; l <= level; ++l) {
    if (!std::exchange(task.level_done[l], 0)) continue;
    for (const Level::Part& part : record.levels[l].parts) {
      for (uint32_t i = part.first; i < part.first + part.count; ++i) {
        const Node& node = record.tape.nodes[record.level_order[i]];
        if (!std::exchange(task.reached[record.level_order[i]], 0)) continue;
        for (uint32_t k = 0; k < node.num_values; ++k) {
          const Allocation& place = record.store.places[node.first_value + k];
          const at::Tensor& grad = task.grads[place.grad];
          const int64_t extent = record.tape.values[node.first_value + k].geometry->extent;
          if (grad.defined()) grad.narrow(0, place.grad_offset, extent).zero_();
          task.begun[node.first_value + k] = 0;
        }
      }
    }
  }
}

// Runs backward for those members of the part that a gradient has reached.
void run_part(FlushRecord& record, BackwardTask& task, GradAccumulator& accumulator,
              const Level::Part& part, bool keep_graph, std::vector<NodeId>& reached) {
  BatchRecord& batch = record.batches[part.batch];
  if (!batch.needs_grad) return;
  const std::span<const NodeId> members(record.level_order.data() + part.first, part.count);
  reached.clear();
  for (NodeId node : members) {
    if (!task.reached[node]) continue;
    check_not_consumed(record, task, node);
    if (task.written != nullptr) task.written->check(node);
    reached.push_back(node);
  }
  if (reached.empty()) return;
  const ProfilerRange range([&] {
    const Node& first = record.tape.nodes[reached.front()];
    return name_of_batch(record.tape, first, reached.size()) + ", backward";
  });
  const TraceBatch traced{batch.signature->serial, 0, reached.size(), 0, 0, 0, true};
  const BatchTimer timer(record.trace.get(), traced);
  const bool all = reached.size() == members.size();
  const std::span<const NodeId> some = all ? members : std::span<const NodeId>(reached);
  accumulator.complete(some);
  BackwardBatch view(record, batch, some, accumulator, part.half);
  const AsReadGuard as_read(record, task, some);
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (batch.rule->below_autograd()) below.emplace();
  if (part.half == Level::Half::kChain) return batch.rule->backward_chain(view);
  batch.rule->backward(view);
  if (keep_graph) return;
  const uint32_t before = batch.consumed;
  for (NodeId node : reached) {
    if (record.consumed[node] || !may_consume(record, node)) continue;
    record.consumed[node] = task.consumed[node] = 1;
    ++batch.consumed;
  }
  record.num_unconsumed -= batch.consumed - before;
  if (batch.consumed == batch.count && before != batch.count) task.finished.push_back(part.batch);
}

// Adds the gradients that the engine has passed to the level's held values. Makes one call for each
// dtype and device.
void add_arrived(BackwardTask& task, GradAccumulator& accumulator, uint32_t level) {
  if (task.arrived.empty()) return;
  std::vector<BackwardTask::Arrived> here, later;
  for (auto& arrived : task.arrived) {
    (arrived.level == level ? here : later).push_back(std::move(arrived));
  }
  task.arrived = std::move(later);
  GeometryTable geometries;
  Regions from, to;
  for (const BackwardTask::Arrived& arrived : here) {
    from.push_back({&arrived.gradient, 0, geometries.intern_contiguous(arrived.gradient.sizes())});
    to.push_back(accumulator.target_behind(arrived.value));
  }
  for_each_kind(from, to, add_regions);
}

void run_level(FlushRecord& record, BackwardTask& task, uint32_t level, bool keep_graph) {
  const ProfilerRange range("torch_autobatch::backward");
  const TraceTimer timer(record.trace.get(), "backward");
  WeightCopies copies;
  const LentWeightCopies lent(record.store, &copies);
  GradAccumulator accumulator(record, task, level);
  add_arrived(task, accumulator, level);
  const Level& plan = record.levels[level];
  std::vector<NodeId> reached;
  for (auto part = plan.parts.rbegin(); part != plan.parts.rend(); ++part) {
    run_part(record, task, accumulator, *part, keep_graph, reached);
    drop_gradients(record, task, *part);
    drop_saved(record, task, level);
  }
}

}  // namespace

void run_levels(FlushRecord& record, BackwardTask& task, uint32_t last, bool keep_graph) {
  // The user may call backward under autocast. Autocast must not change the dtypes in rules.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // `below`: whether a higher level has run, which may have sent gradients to this level.
  bool any = false, below = false;
  for (auto level = static_cast<uint32_t>(record.levels.size()); level-- > last;) {
    if (task.level_done[level] == 0 && (below || level == last || task.level_waits[level] != 0)) {
      run_level(record, task, level, keep_graph);
      task.level_done[level] = 1;
      task.level_waits[level] = 0;
      any = true;
    }
    below = below || task.level_done[level] != 0;
  }
  if (any) run_products(record, task);
}

void expect_gradient(FlushRecord& record, BackwardTask& task, uint32_t level, bool keep_graph) {
  const auto end = task.level_done.begin() + level + 1;
  if (std::any_of(task.level_done.begin(), end, [](uint8_t done) { return done != 0; })) {
    run_levels(record, task, 0, keep_graph);
    reopen_levels(record, task, level);
  }
  task.level_waits[level] = 1;
}

}  // namespace autobatch

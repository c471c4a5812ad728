#include "autobatch/execute.h"

#include "autobatch/autograd.h"
#include "autobatch/body.h"
#include "autobatch/cat_products.h"
#include "autobatch/compat.h"
#include "autobatch/divide.h"
#include "autobatch/executor.h"
#include "autobatch/materialize.h"
#include "autobatch/member_order.h"
#include "autobatch/partial.h"
#include "autobatch/pending_tensor.h"
#include "autobatch/placement.h"
#include "autobatch/pool.h"
#include "autobatch/profile.h"
#include "autobatch/reads.h"
#include "autobatch/rules.h"
#include "autobatch/scope.h"
#include "autobatch/sums.h"
#include "autobatch/verify.h"
#include "autobatch/weight_groups.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <sstream>

namespace autobatch {
namespace {

// The live part of the graph in the scheduler's terms.
struct Compact {
  std::vector<NodeId> nodes;           // by compact number
  std::vector<Signature*> signatures;  // by dense number
  BoundInput input;
  std::vector<uint8_t> heavy;
  uint64_t family = 0;
  Reads reads;

  Compact(const Tape& tape, size_t count) : reads(tape, count) {}

  ScheduleInput view() const {
    ScheduleInput s;
    s.signature = input.signature;
    s.input_begin = input.input_begin;
    s.inputs = input.inputs;
    s.num_signatures = static_cast<uint32_t>(signatures.size());
    s.batchable = input.batchable;
    s.heavy = heavy;
    s.family = family;
    return s;
  }
};

// What nobody can reach any more need not be computed. `held`: the results that somebody can.
std::vector<uint8_t> find_live(const Tape& tape, const std::vector<ValueId>& held) {
  std::vector<uint8_t> live(tape.nodes.size(), 0);
  for (ValueId id : held) live[tape.values[id].node] = 1;
  for (auto node = static_cast<int64_t>(tape.nodes.size()) - 1; node >= 0; --node) {
    if (!live[node]) continue;
    for (ValueId id : tape.operands_of(tape.nodes[node])) {
      if (id == kNone) continue;
      const NodeId producer = tape.values[id].node;
      if (producer != kNone) live[producer] = 1;
    }
  }
  return live;
}

Compact compact(const Tape& tape, const std::vector<uint8_t>& live) {
  const auto count = static_cast<size_t>(std::count(live.begin(), live.end(), 1));
  Compact c(tape, count);
  c.nodes.reserve(count);
  c.input.signature.reserve(count);
  c.input.input_begin.reserve(count + 1);
  c.input.inputs.reserve(2 * count);
  c.input.input_begin.push_back(0);
  for (NodeId id = 0; id < tape.nodes.size(); ++id) {
    if (!live[id]) continue;
    const Node& node = tape.nodes[id];
    c.nodes.push_back(id);
    c.reads.add_node(tape, id);
    Signature* signature = node.signature;
    if (signature->local == kNone) {
      signature->local = static_cast<uint32_t>(c.signatures.size());
      // Summed, for signatures are met in any order.
      const uint64_t mixed = reinterpret_cast<uintptr_t>(signature) * 0x9E3779B97F4A7C15U;
      c.family += mixed ^ (mixed >> 29);
      c.signatures.push_back(signature);
      c.input.batchable.push_back(signature->rule->batchable() ? 1 : 0);
      c.heavy.push_back(signature->rule->heavy() ? 1 : 0);
    }
    c.input.signature.push_back(signature->local);
    for (uint32_t slot = 0; slot < node.num_operands; ++slot) {
      const ValueId operand = tape.operands[node.first_operand + slot];
      if (operand == kNone) continue;
      const Value& value = tape.values[operand];
      if (value.is_outside()) continue;
      c.reads.add_read({value.node, value.index, slot});
      const uint32_t producer = c.reads.number(value.node);
      if (producer != kNone) c.input.inputs.push_back(producer);  // else it is there already
    }
    c.input.input_begin.push_back(static_cast<uint32_t>(c.input.inputs.size()));
  }
  c.reads.finish();
  return c;
}

void fill_batches(FlushRecord& record, const Compact& c, const Schedule& schedule) {
  const auto start = static_cast<uint32_t>(record.order.size());
  record.order.reserve(start + schedule.order.size());
  for (uint32_t node : schedule.order) record.order.push_back(c.nodes[node]);
  for (size_t b = 0; b < schedule.num_batches(); ++b) {
    BatchRecord batch;
    batch.first = start + schedule.batch_begin[b];
    batch.count = schedule.batch_begin[b + 1] - schedule.batch_begin[b];
    batch.signature = record.tape.nodes[record.order[batch.first]].signature;
    batch.rule = batch.signature->rule;
    for (uint32_t i = batch.first; i < batch.first + batch.count && !batch.needs_grad; ++i) {
      batch.needs_grad = record.tape.needs_grad(record.tape.nodes[record.order[i]]);
    }
    record.batches.push_back(std::move(batch));
  }
}

// Signatures outlive the flush and its failures; their numbers in it must not.
class LocalNumbers {
 public:
  explicit LocalNumbers(const Compact& c) : signatures_(c.signatures) {}
  ~LocalNumbers() {
    for (Signature* signature : signatures_) signature->local = kNone;
  }
  LocalNumbers(const LocalNumbers&) = delete;
  LocalNumbers& operator=(const LocalNumbers&) = delete;

 private:
  const std::vector<Signature*>& signatures_;
};

bool is_read(const Tape& tape, ValueId outside, const std::vector<uint8_t>& live) {
  for (NodeId node = 0; node < tape.nodes.size(); ++node) {
    if (!live[node]) continue;
    for (ValueId id : tape.operands_of(tape.nodes[node])) {
      if (id != kNone && tape.values[id].base == outside) return true;
    }
  }
  return false;
}

// Memory can be taken away without an op: FSDP frees what it gathered when a module's forward
// returns, and the ops that read it may still be pending.
void check_memory(const Tape& tape, const std::vector<uint8_t>& live) {
  for (const Outside& outside : tape.outside) {
    if (outside.is_copy || !outside.data.defined() || !outside.data.has_storage()) continue;
    const auto& g = *tape.values[outside.value].geometry;
    const size_t needed =
        static_cast<size_t>(outside.data.storage_offset() + g.extent) * outside.data.element_size();
    const size_t there = outside.data.storage().nbytes();
    if (g.extent == 0 || there >= needed || !is_read(tape, outside.value, live)) continue;
    TORCH_CHECK(false, "torch_autobatch: a tensor of shape ", outside.data.sizes(),
                " was freed before the captured ops that read it ran: its storage has ", there,
                " of ", needed,
                " bytes. fully_shard frees a module's parameters when its forward returns; apply "
                "it to a module whose forward has the whole batch() block in it, not to one that "
                "is called in the block.");
  }
}

// What of a graph is to be run, and what it has to leave for later.
struct Plan {
  std::vector<uint8_t> live;  // by node
  at::ArrayRef<NodeId> waiting = {};
  std::vector<uint8_t> read_later = {};
  const std::vector<ValueId>* held = nullptr;  // results that tensors look at, if they are known
};

void schedule_and_place(FlushRecord& record, Plan& plan, const FlushOptions& options) {
  const ProfilerRange range("torch_autobatch::schedule");
  const size_t first_batch = record.batches.size();
  collapse_sums(record.tape, options.tables->signatures, plan.live, plan.waiting);
  collapse_cats(record.tape, options.tables->signatures, plan.live, plan.waiting);
  Compact c = compact(record.tape, plan.live);
  if (c.nodes.empty()) return;
  const LocalNumbers numbers(c);
  const Schedule schedule = options.policy->schedule(c.view());
  fill_batches(record, c, schedule);
  join_weight_groups(record, first_batch);
  order_members(record, first_batch, c.reads);
  divide_batches(record, first_batch, c.reads);
  place_values(record, {first_batch, c.signatures.size(), c.reads, options.verifier != nullptr,
                        plan.read_later, plan.held});
  options.report->add_flush(options.reason, current_site(), c.nodes.size());
  options.report->add_bound_input(std::move(c.input));
}

// A flush does not run in the state of whoever reads, but in that of before the scope.
class CleanState {
 public:
  explicit CleanState(const FlushOptions& options) : clean_state_(*options.clean) {
    profiler_.restore();
  }

 private:
  const ProfilerState profiler_;
  const at::ThreadLocalStateGuard clean_state_;
  const c10::impl::ExcludeDispatchKeyGuard no_capture_{compat::kDeferKey};
  const c10::InferenceMode no_inference_{false};
  const at::AutoGradMode no_grad_{false};
};

// Adds batches for what is to be run, and runs them. Leaves only what ran in the record.
Failures run_nodes(FlushRecord& record, Plan& plan, const FlushOptions& options) {
  const size_t num_computed = record.order.size(), num_batches = record.batches.size();
  bool placed = false;
  try {
    check_memory(record.tape, plan.live);
    schedule_and_place(record, plan, options);
    placed = true;
    const ProfilerRange range("torch_autobatch::execute");
    return run_batches(record, *options.report, num_batches);
  } catch (...) {  // not even memory for the results
    if (!placed) {
      record.batches.erase(record.batches.begin() + static_cast<ptrdiff_t>(num_batches),
                           record.batches.end());
      record.order.resize(num_computed);
    }
    Failures failures;
    failures.add(std::current_exception());
    return failures;
  }
}

// Runs nodes for targets, and leaves them in the graph. If some fail, those that ran are done.
Failures compute_part(Graph& graph, at::ArrayRef<ValueId> targets, const std::vector<NodeId>& nodes,
                      const FlushOptions& options) {
  graph.forget_memories();
  if (graph.open_record() == nullptr) {
    graph.set_open_record(std::make_shared<FlushRecord>());
    graph.open_record()->tables = options.tables;
  }
  const std::shared_ptr<FlushRecord> record = graph.open_record();
  Plan plan{std::vector<uint8_t>(graph.tape().nodes.size(), 0), graph.waiting(),
            find_read_later(graph, nodes)};
  for (NodeId node : nodes) plan.live[node] = 1;
  const std::vector<ValueId> results = results_of(graph, targets);
  const CleanState clean_state(options);
  const ProfilerRange range([&] { return "torch_autobatch::flush: " + options.reason; });
  const size_t first_node = record->order.size();
  Failures failures;
  {
    const Graph::Loan loan(graph, record->tape);
    failures = run_nodes(*record, plan, options);
    try {
      const ProfilerRange materializes("torch_autobatch::materialize");
      if (!failures && !options.values_only) materialize_results(*record, results);
      if (!failures) drop_unread(*record, plan.read_later);
    } catch (...) {  // no memory for the results' own copies
      failures.add(std::current_exception());
    }
  }
  graph.note_computed(at::ArrayRef<NodeId>(record->order).slice(first_node));
  trim_pool();
  return failures;
}

}  // namespace

void flush_graph(Graph& graph, at::ArrayRef<ValueId> targets, const FlushOptions& options) {
  std::shared_ptr<void> nobody_dies = host_hold();
  graph.settle_orphans();
  Failures failures;
  if (!targets.empty()) {
    const std::vector<NodeId> nodes = graph.choose(targets);
    if (stays_open(graph, targets, nodes, options.values_only)) {
      nobody_dies.reset();
      failures = compute_part(graph, targets, nodes, options);
      if (!failures) return;
      // What failed does so again below, where it is seen to.
      if (!failures.stops()) failures = Failures();
      nobody_dies = host_hold();
      graph.settle_orphans();
    }
  }
  std::shared_ptr<FlushRecord> record = graph.open_record();
  if (record == nullptr) record = std::make_shared<FlushRecord>();
  Split split = graph.split(targets, options.tables->signatures);
  unfold_held_bodies(split);
  HeldTensors held(graph, split);
  nobody_dies.reset();
  if (split.tape.nodes.empty() && held.empty()) return;
  renumber(*record, split);
  record->tables = options.tables;
  record->tape = std::move(split.tape);
  const CleanState clean_state(options);
  const ProfilerRange range([&] { return "torch_autobatch::flush: " + options.reason; });
  if (!failures) {
    const std::vector<ValueId> results = held.results(record->tape);
    Plan plan{find_live(record->tape, results)};
    plan.held = &results;
    for (NodeId node : record->order) plan.live[node] = 0;
    failures = run_nodes(*record, plan, options);
  }
  if (options.verifier != nullptr) {
    try {
      if (!failures) options.verifier->check(*record);
    } catch (...) {
      failures.add(std::current_exception());
    }
    options.verifier->clear();
  }
  std::vector<Computed> exported;
  try {
    const ProfilerRange materializes("torch_autobatch::materialize");
    exported = held.materialize(record, failures);
    if (record->is_held.empty()) {  // else what was computed from them may be computed again
      for (const auto& held_slab : record->store.held_only) {
        record->store.slabs[held_slab.slab] = at::Tensor();
      }
    }
  } catch (...) {  // no memory for the results' own copies
    failures.add(std::current_exception());
    exported = held.lose_rest(failures.first());
  }
  graph.fill_exports(split, exported);
  trim_pool();
  if (!failures) return;
  if (options.losses != nullptr) failures.copy_to(*options.losses);
  std::rethrow_exception(failures.first().cause);
}

}  // namespace autobatch

#include "autobatch/execute/flush.h"

#include "autobatch/backward/autograd_nodes.h"
#include "autobatch/backward/overwrites.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/common/plain_state.h"
#include "autobatch/common/pool.h"
#include "autobatch/debug/trace.h"
#include "autobatch/debug/verify.h"
#include "autobatch/execute/batch_runner.h"
#include "autobatch/execute/incremental_flush.h"
#include "autobatch/execute/materialize.h"
#include "autobatch/graph/intern_tables.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/graph/slice_costs.h"
#include "autobatch/plan/chain_depth.h"
#include "autobatch/plan/deferred_checks.h"
#include "autobatch/plan/flush_graph.h"
#include "autobatch/plan/memory_plan.h"
#include "autobatch/plan/passes.h"
#include "autobatch/rules/rule.h"
#include "autobatch/subgraph/subgraph.h"

#include <algorithm>
#include <chrono>
#include <optional>

namespace autobatch {
namespace {

void fill_batches(FlushRecord& record, const FlushGraph& graph, const Schedule& schedule) {
  const auto start = static_cast<uint32_t>(record.order.size());
  // Reserves memory only for a new record. In an open record, reserving the exact size would copy
  // all earlier batches at each read.
  if (start == 0) record.batches.reserve(schedule.num_batches());
  for (size_t b = 0; b < schedule.num_batches(); ++b) {
    const std::span<const uint32_t> members = schedule.batch(b);
    const FlushGraph::Kind& kind = graph.kind(members.front());
    BatchRecord& batch = record.batches.emplace_back();
    batch.first = start + schedule.batch_begin[b];
    batch.count = static_cast<uint32_t>(members.size());
    batch.signature = kind.signature;
    batch.rule = batch.signature->rule;
    batch.needs_grad = kind.needs_grad && std::ranges::any_of(members, [&](uint32_t number) {
                         return record.tape.needs_grad(record.tape.nodes[graph.id(number)]);
                       });
  }
}

bool is_read(const Tape& tape, ValueId graph_input, const FlushGraph& graph) {
  for (uint32_t number = 0; number < graph.size(); ++number) {
    for (ValueId id : tape.operands_of(tape.nodes[graph.id(number)])) {
      if (id != kNone && tape.values[id].base == graph_input) return true;
    }
  }
  return false;
}

// If `graph` is small, calls `function` only for the graph inputs that nodes of `graph` read, and
// may call it several times for one graph input. If `graph` is large, calls `function` once for
// each graph input of the tape.
template <class Function>
void for_each_graph_input(const Tape& tape, const FlushGraph& graph, const Function& function) {
  if (graph.size() > tape.graph_inputs.size() / 4) {
    for (const GraphInput& graph_input : tape.graph_inputs) function(graph_input);
    return;
  }
  for (uint32_t number = 0; number < graph.size(); ++number) {
    for (ValueId id : tape.operands_of(tape.nodes[graph.id(number)])) {
      if (id != kNone && tape.values[id].is_graph_input()) {
        function(tape.graph_inputs[tape.values[id].index]);
      }
    }
  }
}

// Checks that the memory of graph inputs still exists. The memory can be freed without an op. For
// example, FSDP gathers parameters and frees them when a module's forward returns. Ops that read
// these parameters may still be pending at that time.
void check_memory(const Tape& tape, const FlushGraph& graph) {
  for_each_graph_input(tape, graph, [&](const GraphInput& graph_input) {
    if (graph_input.is_copy || !graph_input.data.defined() || !graph_input.data.has_storage())
      return;
    const auto& g = *tape.values[graph_input.value].geometry;
    const size_t needed = static_cast<size_t>(graph_input.data.storage_offset() + g.extent) *
                          graph_input.data.element_size();
    const size_t there = graph_input.data.storage().nbytes();
    if (g.extent == 0 || there >= needed || !is_read(tape, graph_input.value, graph)) return;
    TORCH_CHECK(false, "torch_autobatch: a tensor of shape ", graph_input.data.sizes(),
                " was freed before the captured ops that read it ran: its storage has ", there,
                " of ", needed,
                " bytes. fully_shard frees the parameters of a module when the module's forward "
                "returns. Apply fully_shard to a module whose forward contains the whole batch() "
                "block, not to a module that is called in the block.");
  });
}

// The part of a tape that a flush runs.
struct Plan {
  at::ArrayRef<NodeId> nodes;
  // Results that tensors refer to. The flush runs only the nodes on which these results depend. If
  // `held` is null, the flush runs all of `nodes`.
  const std::vector<ValueId>* held = nullptr;
};

TraceSchedule traced(const FlushGraph& graph, std::span<const BatchRecord> batches) {
  TraceSchedule schedule;
  schedule.num_batches = batches.size();
  schedule.batch_of_node.resize(graph.size());
  for (size_t b = 0; b < batches.size(); ++b) {
    for (const uint32_t number : graph.members(batches[b])) schedule.batch_of_node[number] = b;
  }
  for (uint32_t number = 0; number < graph.size(); ++number) {
    std::vector<uint32_t>& inputs = schedule.inputs_of_node.emplace_back();
    for (const uint32_t producer : graph.producers(number)) {
      if (std::ranges::find(inputs, producer) == inputs.end()) inputs.push_back(producer);
    }
  }
  return schedule;
}

// Whether the report needs the depths of the flush's nodes (plan/chain_depth.h). Returns false for
// the only flush of a block, for slices, and for flushes that instances of a map wait for.
bool may_be_early(const FlushOptions& options) {
  if (options.costs != nullptr || options.reason.ends_with(kOfMap)) return false;
  return options.report->is_open || options.report->num_flushes > 0;
}

void schedule_and_place(FlushRecord& record, const Plan& plan, const FlushOptions& options) {
  const ProfilerRange range("torch_autobatch::schedule");
  const TraceTimer timer(record.trace.get(), "schedule");
  const size_t first_batch = record.batches.size();
  Tape& tape = record.tape;
  FlushGraph graph;
  graph.build(tape, plan.nodes, plan.held);
  check_memory(tape, graph);
  const int64_t began = record.trace == nullptr ? 0 : record.trace->now();
  rewrite_graph(tape, graph, *options.tables, plan.nodes, plan.held, *options.report);
  if (graph.size() == 0) return;
  if (may_be_early(options)) note_depth(record, graph, *options.report);
  Schedule schedule = options.policy->schedule(graph.view());
  fill_batches(record, graph, schedule);
  graph.set_order(std::move(schedule.order), static_cast<uint32_t>(record.order.size()));
  rewrite_schedule(record, graph, first_batch, *options.report);
  place_values(record, {first_batch, graph, options.verifier != nullptr, plan.held});
  graph.append_order(record.order);
  const size_t num_batches = record.batches.size() - first_batch;
  std::string site = current_site();
  if (record.trace != nullptr) {
    record.trace->add_flush({options.reason, site, began});
    const auto batches = std::span<const BatchRecord>(record.batches).subspan(first_batch);
    record.trace->add_schedule(traced(graph, batches));
  }
  options.report->keep(record.tables);
  options.report->add_flush(
      {options.reason, std::move(site), graph.size(), 1, num_batches, current_caller()});
  // A slice adds no input for the lower bound, because there are many slices, and each slice is
  // only a part of a flush.
  if (options.costs == nullptr) options.report->add_bound_input(graph.take_bound_input());
}

// RAII guard that restores the thread state from before the scope. The flush runs in this state,
// and not in the state of the code that reads a value.
class CleanState {
 public:
  explicit CleanState(const FlushOptions& options) : clean_state_(*options.clean) {
    profiler_.restore();
  }

 private:
  const ProfilerState profiler_;
  const at::ThreadLocalStateGuard clean_state_;
  const PlainStateGuard plain_;
};

// Adds batches for the nodes of `plan` to the record and runs the batches. Afterwards the record
// contains only the batches and nodes that ran.
Failures run_nodes(FlushRecord& record, const Plan& plan, const FlushOptions& options) {
  const size_t num_computed = record.order.size(), num_batches = record.batches.size();
  bool placed = false;
  try {
    schedule_and_place(record, plan, options);
    placed = true;
    const ProfilerRange range("torch_autobatch::execute");
    const TraceTimer timer(record.trace.get(), "execute");
    return run_batches(record, options, num_batches);
  } catch (...) {  // for example, there is no memory for the slabs
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

// Runs `nodes`, which compute the targets, and leaves the nodes in the graph. If some nodes fail,
// the other nodes that ran remain computed.
Failures compute_part(Graph& graph, at::ArrayRef<ValueId> targets, const std::vector<NodeId>& nodes,
                      const FlushOptions& options) {
  graph.forget_memories();
  if (graph.open_record() == nullptr) {
    graph.set_open_record(std::make_shared<FlushRecord>());
    graph.open_record()->tables = options.tables;
    graph.open_record()->trace = options.report->trace;
    graph.open_record()->verified = options.verifier != nullptr;
  }
  const std::shared_ptr<FlushRecord> record = graph.open_record();
  const std::vector<ValueId> results = results_of(graph, targets);
  const CleanState clean_state(options);
  const ProfilerRange range([&] { return "torch_autobatch::flush: " + options.reason; });
  const size_t first_node = record->order.size();
  Failures failures;
  {
    const Graph::Loan loan(graph, record->tape);
    failures = run_nodes(*record, {nodes}, options);
    try {
      const ProfilerRange materializes("torch_autobatch::materialize");
      const TraceTimer timer(record->trace.get(), "materialize");
      if (!failures && !options.values_only) materialize_results(*record, results);
    } catch (...) {  // for example, there is no memory for the copies of the results
      failures.add(std::current_exception());
    }
  }
  if (record->trace != nullptr) record->trace->end_flushes();
  graph.note_computed(nodes, at::ArrayRef<NodeId>(record->order).slice(first_node), !failures);
  for (ValueId result : results) graph.review(result);
  if (!failures) graph.compact();
  trim_pool();
  return failures;
}

// Evaluates waiting checks. A check that passes releases the tensors that it keeps. A tensor
// without any other reference is then dropped before it becomes real.
void settle_checks(FlushRecord& record, HeldTensors& held, DeferredChecks* checks) {
  if (checks == nullptr || !checks->any_waiting()) return;
  std::vector<uint8_t> ran(record.tape.nodes.size(), 0);
  for (NodeId node : record.order) ran[node] = 1;
  const auto find = [&](const PendingTensor& tensor) -> std::optional<Region> {
    const Value& value = record.tape.values[tensor.value()];
    if (!value.is_graph_input() && ran[value.node] == 0) return std::nullopt;
    return record.store.region(record.tape, tensor.value());
  };
  const std::shared_ptr<void> nobody_dies = host_hold();
  if (checks->settle(find, [](const PendingTensor&) { return nullptr; })) held.let_go(record.tape);
}

void verify(const FlushRecord& record, const FlushOptions& options, Failures& failures) {
  if (options.verifier == nullptr) return;
  try {
    if (!failures) options.verifier->check(record);
  } catch (...) {
    failures.add(std::current_exception());
  }
  options.verifier->clear();
}

// Turns the held tensors into real tensors. Returns the tensors of the exports of the split.
std::vector<Computed> materialize(const std::shared_ptr<FlushRecord>& record, HeldTensors& held,
                                  const FlushOptions& options, Failures& failures) {
  try {
    const ProfilerRange materializes("torch_autobatch::materialize");
    const TraceTimer timer(record->trace.get(), "materialize");
    std::vector<Computed> exported = held.materialize(record, failures);
    if (options.read_records != nullptr) options.read_records->add(record);
    if (record->is_held.empty()) {  // if it is not empty, Recompute may read the slabs
      Store& store = record->store;
      for (const uint32_t slab : store.held) {
        if (store.savers[slab] == 0) store.slabs[slab] = at::Tensor();
      }
    }
    return exported;
  } catch (...) {  // for example, there is no memory for the copies of the results
    failures.add(std::current_exception());
    return held.lose_rest(failures.first());
  }
}

std::vector<NodeId> nodes_to_run(const Tape& tape) {
  std::vector<NodeId> nodes;
  nodes.reserve(tape.nodes.size());
  for (NodeId id = 0; id < tape.nodes.size(); ++id) {
    const NodeState state = tape.nodes[id].state;
    if (state != NodeState::kComputed && state != NodeState::kGone) nodes.push_back(id);
  }
  return nodes;
}

// Runs `nodes`, which were chosen for the targets, and closes the open record. If there are neither
// nodes nor targets, runs all pending nodes. Nodes that failed before run again, to find the
// tensors that become lost. All computed nodes are removed from the graph, including the nodes that
// earlier reads have computed. The tensors of these nodes become real.
void close_part(Graph& graph, at::ArrayRef<ValueId> targets, std::vector<NodeId> nodes,
                const FlushOptions& options, Failures failures) {
  std::shared_ptr<void> nobody_dies = host_hold();
  graph.settle_orphans();
  std::shared_ptr<FlushRecord> record = graph.open_record();
  if (record == nullptr) record = std::make_shared<FlushRecord>();
  const bool all = (nodes.empty() && targets.empty()) || has_shared_memory(graph.tape());
  Split split = all ? graph.split() : graph.split(targets, nodes, options.tables->signatures);
  renumber(*record, split);
  unfold_held_subgraphs(split, *record);
  HeldTensors held(graph, split, record->store);
  nobody_dies.reset();
  if (split.tape.nodes.empty() && held.empty()) return;
  record->tables = options.tables;
  record->trace = options.report->trace;
  record->verified = options.verifier != nullptr;
  record->tape = std::move(split.tape);
  const CleanState clean_state(options);
  const ProfilerRange range([&] { return "torch_autobatch::flush: " + options.reason; });
  if (!failures) {
    const std::vector<ValueId> results = held.results(record->tape);
    nodes = nodes_to_run(record->tape);
    failures = run_nodes(*record, {nodes, &results}, options);
  }
  if (may_be_early(options)) keep_depths(*record, *options.report);
  record->depths = {};
  verify(*record, options, failures);
  settle_checks(*record, held, options.checks);
  const std::vector<Computed> exported = materialize(record, held, options, failures);
  if (record->trace != nullptr) record->trace->end_flushes();
  graph.fill_exports(split, exported);
  graph.compact();
  trim_pool();
  if (!failures) return;
  if (options.losses != nullptr) failures.copy_to(*options.losses);
  std::rethrow_exception(failures.first().cause);
}

// Tries to compute `nodes` without removing the nodes from the graph. Returns true on success.
// Otherwise `failures` is set only if no node may run again.
bool leave_open(Graph& graph, at::ArrayRef<ValueId> targets, const std::vector<NodeId>& nodes,
                const FlushOptions& options, Failures& failures) {
  if (!stays_open(graph, targets, nodes, options.values_only)) return false;
  failures = compute_part(graph, targets, nodes, options);
  if (!failures) return true;
  if (!failures.stops()) failures = Failures();
  return false;
}

}  // namespace

void flush_pending(Graph& graph, at::ArrayRef<ValueId> targets, const FlushOptions& options) {
  Failures failures;
  std::vector<NodeId> nodes;
  if (!options.values_only && has_shared_memory(graph.tape())) targets = {};
  if (!targets.empty()) {
    {
      const std::shared_ptr<void> nobody_dies = host_hold();
      graph.settle_orphans();
      nodes = graph.choose(targets);
    }
    if (leave_open(graph, targets, nodes, options, failures)) return;
  }
  close_part(graph, targets, std::move(nodes), options, std::move(failures));
}

bool run_slice(Graph& graph, const FlushOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  std::vector<NodeId> nodes;
  {
    const std::shared_ptr<void> nobody_dies = host_hold();
    graph.settle_orphans();
    nodes = graph.choose_slice(*options.costs);
  }
  if (nodes.empty()) return false;
  const size_t num_nodes = nodes.size();
  Failures failures;
  if (!leave_open(graph, {}, nodes, options, failures)) {
    close_part(graph, {}, std::move(nodes), options, std::move(failures));
  }
  options.costs->end(std::chrono::steady_clock::now() - began, num_nodes);
  return true;
}

void relieve_graph(Graph& graph, const FlushOptions& options) {
  {
    const std::shared_ptr<void> nobody_dies = host_hold();
    graph.settle_orphans();
  }
  std::vector<NodeId> nodes = graph.choose_ready((graph.num_waiting() + 1) / 2);
  Failures failures;
  if (options.verifier == nullptr && leave_open(graph, {}, nodes, options, failures)) return;
  if (!failures) nodes.clear();  // all pending nodes run
  close_part(graph, {}, std::move(nodes), options, std::move(failures));
}

}  // namespace autobatch

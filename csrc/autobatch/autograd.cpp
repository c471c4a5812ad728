#include "autobatch/autograd.h"

#include "autobatch/op_info.h"
#include "autobatch/replay.h"
#include "autobatch/rules.h"
#include "autobatch/scope.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <utility>

namespace autobatch {
namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;

uint32_t add_metadata(torch::autograd::Node& node, const Value& value) {
  return node.add_input_metadata(at::TensorOptions().dtype(value.dtype).device(value.device),
                                 c10::fromIntArrayRefUnchecked(value.geometry->sizes), false, false,
                                 value.dtype);
}

// What a held value's gradient flows to at one level: the outside tensors that are read there, and
// the held values of lower levels.
struct Reach {
  std::vector<uint32_t> outside;
  std::vector<uint32_t> exports;  // into FlushRecord::exports
};

// Whether the gradient of each outside tensor is asked for in the running pass.
std::vector<uint8_t> wanted_outside(const FlushRecord& record) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  std::vector<uint8_t> wanted(record.tape.outside.size(), 0);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Outside& outside = record.tape.outside[i];
    if (!outside.edge.is_valid()) continue;
    wanted[i] = 1;
    if (chosen == nullptr || chosen->empty()) continue;
    const auto found = chosen->find(outside.edge.function.get());
    wanted[i] = found != chosen->end() && found->second.should_execute() ? 1 : 0;
  }
  return wanted;
}

// Whether the gradient is no ordinary tensor but a transform's, whose ops must see it: of vmap
// (`is_grads_batched`), of another of functorch's, of forward-mode AD, or a tensor subclass.
bool is_transformed(const at::Tensor& gradient) {
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Python});
  const auto* meta = torch::autograd::impl::get_autograd_meta(gradient);
  return gradient.key_set().has_any(kTransforms) || (meta != nullptr && meta->fw_grad_ != nullptr);
}

// The state of the running pass, made on first use; it goes when the pass ends.
BackwardTask& current_task(const std::shared_ptr<FlushRecord>& record) {
  const int id = torch::autograd::get_current_graph_task_id();
  std::unique_ptr<BackwardTask>& task = record->tasks[id];
  if (task == nullptr) {
    task = make_task(*record, wanted_outside(*record));
    if (Scope* scope = Scope::current()) ++scope->report().backward_calls;
    torch::autograd::Engine::get_default_engine().queue_callback([record, id] {
      const std::lock_guard<std::mutex> lock(record->mutex);
      record->tasks.erase(id);
      if (record->num_unconsumed == 0 && record->tasks.empty()) record->free_saved();
    });
  }
  return *task;
}

// Where the gradients of one held value leave one level. The first of a level to run computes the
// level, for all held values that a gradient has reached: nodes are made in such an order that the
// engine, which prefers later ones, runs every held value's node before it (on another thread than
// the flush's it may not; the level is then run again for what comes late). Each has edges to what
// its own value depends on and to nothing else, so that what other instances depend on is not run.
class ExitNode final : public torch::autograd::Node {
 public:
  ExitNode(std::shared_ptr<FlushRecord> record, uint32_t level, const Value& held)
      : record_(std::move(record)), level_(level) {
    add_metadata(*this, held);  // no gradient comes here, only the order; on the value's device
  }

  std::string name() const override { return "AutobatchExit"; }

  // `held_edges`: of the record's held values; `below`: this value's exit from a lower level.
  void connect(const Reach& reach, const std::vector<Edge>& held_edges, compat::NodePtr below) {
    reach_ = reach;
    for (uint32_t i : reach_.outside) {
      add_next_edge(record_->tape.outside[i].edge);
    }
    for (uint32_t e : reach_.exports) add_next_edge(held_edges[record_->exports[e].held]);
    if (below) add_next_edge(Edge(std::move(below), 0));
  }

  // The autograd nodes of the held values that cut this value's graph, at this level and below.
  void collect_cuts(Replay::CutEdges& edges) const {
    const size_t first = reach_.outside.size();
    for (size_t i = 0; i < reach_.exports.size(); ++i) {
      edges[record_->exports[reach_.exports[i]].value] = next_edge(first + i);
    }
    const size_t below = first + reach_.exports.size();
    if (below == num_outputs()) return;
    static_cast<const ExitNode&>(*next_edge(below).function).collect_cuts(edges);
  }

 private:
  variable_list apply(variable_list&&) override {
    const std::lock_guard<std::mutex> lock(record_->mutex);
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    BackwardTask& task = current_task(record_);
    variable_list out(num_outputs());
    if (!c10::GradMode::is_enabled()) take_batched(task, out);
    if (task.replay != nullptr) add_replayed(*task.replay, out);
    return out;
  }

  void take_batched(BackwardTask& task, variable_list& out) const {
    if (!task.level_done[level_]) {
      task.level_done[level_] = 1;
      run_level(*record_, task, level_, torch::autograd::get_current_graph_task_keep_graph());
      run_products(*record_, task);
    }
    size_t next = 0;
    for (uint32_t i : reach_.outside) out[next++] = take_outside(task, i);
    for (uint32_t e : reach_.exports) out[next++] = take_export(task, e);
  }

  void add_replayed(Replay& replay, variable_list& out) const {
    const auto add = [](at::Tensor& sum, at::Tensor gradient) {
      sum = sum.defined() && gradient.defined() ? sum + gradient
            : sum.defined()                     ? sum
                                                : std::move(gradient);
    };
    size_t next = 0;
    for (uint32_t i : reach_.outside) add(out[next++], replay.take_outside(i));
    for (uint32_t e : reach_.exports) add(out[next++], replay.take_cut(record_->exports[e].value));
  }

  // The gradient collected so far, once.
  at::Tensor take_outside(BackwardTask& task, uint32_t i) const {
    if (!task.outside_wanted[i] || !task.outside_grads[i].defined()) return {};
    const at::Tensor flat = std::exchange(task.outside_grads[i], at::Tensor());
    const Geometry& g = *record_->tape.values[record_->tape.outside[i].value].geometry;
    const at::Tensor gradient = flat.as_strided(g.sizes, g.strides, 0);
    if (g.extent != g.numel) return gradient.contiguous();  // gaps are the tensor's own affair
    return gradient.variable_data();                        // no view, for the user
  }

  at::Tensor take_export(BackwardTask& task, uint32_t e) const {
    if (!task.export_grads[e].defined()) return {};
    const at::Tensor flat = std::exchange(task.export_grads[e], at::Tensor());
    const Export& from = record_->exports[e];
    return flat.as_strided(from.geometry->sizes, from.geometry->strides, from.offset)
        .clone(at::MemoryFormat::Contiguous);
  }

  std::shared_ptr<FlushRecord> record_;
  uint32_t level_;
  Reach reach_;
};

// Hooks of one held value must not see the undefined gradient that reaches its node when only
// other instances are differentiated: in eager the node would not run at all.
class DefinedOnlyHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit DefinedOnlyHook(torch::autograd::FunctionPreHook* hook) : hook_(hook) {}
  variable_list operator()(const variable_list& grads) override {
    return grads[0].defined() ? (*hook_)(grads) : grads;
  }

 private:
  torch::autograd::FunctionPreHook* hook_;
};

// The grad_fn of one held value. It is on the path of all that was computed from the value, so
// hooks, retain_grad and autograd.grad with respect to it work as in eager. Its gradient joins
// those of the other held values of its level.
class HeldNode final : public torch::autograd::Node {
 public:
  // `op` by its schema's name, "aten::tanh".
  HeldNode(std::shared_ptr<FlushRecord> record, const HeldValue& held, const std::string& op)
      : record_(std::move(record)), held_(held), op_(op.substr(op.rfind(':') + 1)) {
    add_metadata(*this, record_->tape.values[held_.value]);
  }

  std::string name() const override { return "AutobatchBackward[" + op_ + "]"; }

  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept
      override {
    guarded_.clear();
    for (const auto& hook : Node::tensor_pre_hooks()) {
      guarded_.push_back(std::make_unique<DefinedOnlyHook>(hook.get()));
    }
    return guarded_;
  }

 private:
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return {at::Tensor()};
    const std::lock_guard<std::mutex> lock(record_->mutex);
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    BackwardTask& task = current_task(record_);
    if (c10::GradMode::is_enabled() || is_transformed(grads[0])) return replay(task, grads[0]);
    const at::AutoGradMode no_grad(false);
    if (task.level_done[held_.level]) reopen_levels(*record_, task, held_.level);
    GradientSink sink(*record_, task, held_.level);
    const at::Tensor grad = grads[0].to(record_->tape.values[held_.value].dtype);
    scatter_add(plain(grad), {sink.target_behind(held_.value)});
    return {at::Tensor()};
  }

  // Where others must see each op: with create_graph, or in a transform.
  variable_list replay(BackwardTask& task, const at::Tensor& grad) {
    if (task.replay == nullptr) task.replay = std::make_unique<Replay>(*record_);
    Replay::CutEdges edges;
    static_cast<const ExitNode&>(*next_edge(0).function).collect_cuts(edges);
    task.replay->differentiate(held_.value, grad, edges);
    if (torch::autograd::get_current_graph_task_keep_graph()) return {at::Tensor()};
    for (NodeId node : task.replay->nodes()) {
      if (!record_->tape.values[record_->tape.nodes[node].first_value].requires_grad) continue;
      if (!std::exchange(record_->consumed[node], 1)) --record_->num_unconsumed;
    }
    return {at::Tensor()};
  }

  std::shared_ptr<FlushRecord> record_;
  HeldValue held_;
  std::string op_;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> guarded_;
};

// --- levels ---

// Marks the nodes whose results eager would have computed one from the other, if that other is
// held.
bool mark_divided(FlushRecord& record, const std::vector<uint8_t>& held) {
  std::vector<uint8_t> divided;
  for (const BatchRecord& batch : record.batches) {
    const uint32_t from = batch.needs_grad ? batch.rule->chain().from : kNone;
    if (from == kNone) continue;
    for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
      const NodeId node = record.order[i];
      if (!held[record.tape.nodes[node].first_value + from]) continue;
      divided.resize(record.tape.nodes.size(), 0);
      divided[node] = 1;
    }
  }
  record.is_divided = std::move(divided);
  return !record.is_divided.empty();
}

// Marks what is read through views of it.
std::vector<uint8_t> find_viewed(const FlushRecord& record) {
  std::vector<uint8_t> viewed(record.tape.values.size(), 0);
  const auto mark = [&](ValueId id) {
    if (id != kNone) id = record.tape.values[id].parent;
    for (; id != kNone && !viewed[id]; id = record.tape.values[id].parent) viewed[id] = 1;
  };
  for (NodeId node : record.order) {
    for (ValueId id : record.tape.operands_of(record.tape.nodes[node])) mark(id);
  }
  for (const HeldValue& h : record.held) mark(h.value);
  return viewed;
}

// Marks the held values that a node reads, directly or through views. False if there is none.
bool mark_held(FlushRecord& record) {
  std::vector<uint8_t> held(record.tape.values.size(), 0);
  std::vector<uint8_t> viewed;
  for (const HeldValue& h : record.held) {
    held[h.value] = 1;
    if (!record.tape.values[h.value].geometry->overlapping) continue;
    // Where elements share memory, a view does not tell which of them it is of.
    if (viewed.empty()) viewed = find_viewed(record);
    held[h.value] = !viewed[h.value];
  }
  const auto reads_held = [&](ValueId id) {
    for (; id != kNone; id = record.tape.values[id].parent) {
      if (held[id]) return true;
    }
    return false;
  };
  bool any = false;
  for (NodeId node : record.order) {
    for (ValueId id : record.tape.operands_of(record.tape.nodes[node])) {
      if (id != kNone && reads_held(id)) any = true;
    }
  }
  for (const HeldValue& h : record.held) {  // a held view of a held value
    const ValueId parent = record.tape.values[h.value].parent;
    if (parent != kNone && reads_held(parent)) any = true;
  }
  any = mark_divided(record, held) || any;
  if (any) record.is_held = std::move(held);
  return any;
}

// Of a divided node: the result that is computed from the held one, and the held one; else kNone.
ValueId chained_result(const FlushRecord& record, NodeId id) {
  const Node& node = record.tape.nodes[id];
  return record.divided(id) ? node.first_value + node.signature->rule->chain().result : kNone;
}

ValueId chain_source(const FlushRecord& record, NodeId id) {
  const Node& node = record.tape.nodes[id];
  return record.divided(id) ? node.first_value + node.signature->rule->chain().from : kNone;
}

// The level of each value: how many held values lie on the longest way to it.
void assign_levels(FlushRecord& record) {
  const Tape& tape = record.tape;
  std::vector<uint32_t>& level = record.value_level;
  level.assign(tape.values.size(), 0);
  std::vector<uint8_t> live(tape.nodes.size(), 0);
  for (NodeId node : record.order) live[node] = 1;
  const auto above = [&](ValueId id) { return level[id] + record.is_held[id]; };
  // Values are numbered in capture order: operands and parents come first.
  for (ValueId id = 0; id < tape.values.size(); ++id) {
    const Value& value = tape.values[id];
    if (value.parent != kNone) {
      level[id] = above(value.parent);
    } else if (!value.is_outside() && live[value.node]) {
      for (ValueId operand : tape.operands_of(tape.nodes[value.node])) {
        if (operand != kNone && tape.values[operand].requires_grad) {
          level[id] = std::max(level[id], above(operand));
        }
      }
      if (id == chained_result(record, value.node)) ++level[id];
    }
  }
}

// The level that a node's operands get their gradients at.
uint32_t node_level(const FlushRecord& record, NodeId node) {
  if (record.value_level.empty()) return 0;
  const ValueId from = chain_source(record, node);
  return record.value_level[from != kNone ? from : record.tape.nodes[node].first_value];
}

// Notes that `level` sends gradients to the held value that `id` is reached through.
void note_export(FlushRecord& record, uint32_t level, ValueId id) {
  const ValueId cut = id == kNone ? kNone : record.cut(id);
  if (cut == kNone) return;
  std::vector<Export>& exports = record.exports;
  const uint64_t key = (static_cast<uint64_t>(level) << 32) | cut;
  if (!record.export_index.emplace(key, static_cast<uint32_t>(exports.size())).second) return;
  const auto held = std::find_if(record.held.begin(), record.held.end(),
                                 [&](const HeldValue& h) { return h.value == cut; });
  const Value& value = record.tape.values[cut];
  Export e{cut, static_cast<uint32_t>(held - record.held.begin()), value.geometry, value.offset};
  if (value.geometry->overlapping) {
    e.geometry = record.export_geometries.intern_contiguous(value.geometry->sizes);
    e.offset = 0;
  }
  exports.push_back(e);
}

void plan_single_level(FlushRecord& record) {
  Level& level = record.levels.emplace_back();
  record.level_order = record.order;
  for (uint32_t b = 0; b < record.batches.size(); ++b) {
    level.parts.push_back({b, record.batches[b].first, record.batches[b].count});
  }
}

// Divides the members of a batch among the levels.
void plan_batch(FlushRecord& record, uint32_t b) {
  using Half = Level::Half;
  const BatchRecord& batch = record.batches[b];
  std::map<std::pair<uint32_t, Half>, std::vector<NodeId>> members;
  for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
    const NodeId node = record.order[i];
    const uint32_t level = node_level(record, node);
    const ValueId chained = chained_result(record, node);
    members[{level, chained == kNone ? Half::kWhole : Half::kRest}].push_back(node);
    if (chained != kNone) {
      members[{record.value_level[chained], Half::kChain}].push_back(node);
      note_export(record, record.value_level[chained], chain_source(record, node));
    }
    for (ValueId id : record.tape.operands_of(record.tape.nodes[node])) {
      if (id != kNone && record.tape.values[id].requires_grad) note_export(record, level, id);
    }
  }
  for (const auto& [where, nodes] : members) {
    const auto first = static_cast<uint32_t>(record.level_order.size());
    record.level_order.insert(record.level_order.end(), nodes.begin(), nodes.end());
    record.levels[where.first].parts.push_back(
        {b, first, static_cast<uint32_t>(nodes.size()), where.second});
  }
}

void plan_levels(FlushRecord& record) {
  if (!mark_held(record)) return plan_single_level(record);
  assign_levels(record);
  uint32_t top = 0;
  for (NodeId node : record.order) {
    const ValueId chained = chained_result(record, node);
    top = std::max(top, chained == kNone ? node_level(record, node) : record.value_level[chained]);
  }
  for (HeldValue& h : record.held) {
    h.level = record.value_level[h.value];
    top = std::max(top, h.level);
  }
  record.levels.resize(top + 1);
  // Batch by batch, so that each level keeps the schedule's order.
  for (uint32_t b = 0; b < record.batches.size(); ++b) plan_batch(record, b);
  for (const HeldValue& h : record.held) {
    note_export(record, h.level, record.tape.values[h.value].parent);
  }
}

// Collects, level by level, what a held value's gradient flows to.
class ReachFinder {
 public:
  explicit ReachFinder(const FlushRecord& record)
      : record_(record),
        node_seen_(record.tape.nodes.size(), 0),
        outside_seen_(record.tape.outside.size(), 0),
        export_seen_(record.exports.size(), 0) {}

  // By level; levels without any are left out.
  std::map<uint32_t, Reach> find(const HeldValue& held) {
    ++round_;
    std::map<uint32_t, Reach> reach;
    reach[held.level];
    const Value& value = record_.tape.values[held.value];
    if (value.parent != kNone) {
      read(value.parent, held.level, reach);
    } else {
      visit_producer(held.value, reach);
    }
    while (!stack_.empty()) {
      const NodeId node = stack_.back();
      stack_.pop_back();
      const uint32_t level = node_level(record_, node);
      for (ValueId id : record_.tape.operands_of(record_.tape.nodes[node])) {
        if (id != kNone && record_.tape.values[id].requires_grad) read(id, level, reach);
      }
    }
    return reach;
  }

 private:
  void visit(NodeId node) {
    if (std::exchange(node_seen_[node], round_) != round_) stack_.push_back(node);
  }

  // Of a base.
  void visit_producer(ValueId id, std::map<uint32_t, Reach>& reach) {
    const NodeId node = record_.tape.values[id].node;
    visit(node);
    if (id == chained_result(record_, node)) {
      add_export(chain_source(record_, node), record_.value_level[id], reach);
    }
  }

  void add_export(ValueId cut, uint32_t level, std::map<uint32_t, Reach>& reach) {
    const uint32_t e = record_.export_index.at(static_cast<uint64_t>(level) << 32 | cut);
    if (std::exchange(export_seen_[e], round_) != round_) reach[level].exports.push_back(e);
  }

  // The value `id` is read by a node of `level`. An outside tensor or a held value read at several
  // levels gets an edge from each.
  void read(ValueId id, uint32_t level, std::map<uint32_t, Reach>& reach) {
    const ValueId cut = record_.cut(id);
    const Value& base = record_.tape.values[record_.tape.values[id].base];
    if (cut != kNone) {
      add_export(cut, level, reach);
    } else if (!base.is_outside()) {
      visit_producer(record_.tape.values[id].base, reach);
    } else {
      // Levels come in no order: an earlier note at another level does not do.
      const uint64_t mark = round_ << 16 | level;
      if (std::exchange(outside_seen_[base.index], mark) != mark) {
        std::vector<uint32_t>& outside = reach[level].outside;
        if (std::find(outside.begin(), outside.end(), base.index) == outside.end() ||
            record_.levels.size() == 1) {
          outside.push_back(base.index);
        }
      }
    }
  }

  const FlushRecord& record_;
  uint64_t round_ = 0;
  std::vector<uint64_t> node_seen_, outside_seen_, export_seen_;
  std::vector<NodeId> stack_;
};

}  // namespace

std::vector<Edge> make_autograd_nodes(const std::shared_ptr<FlushRecord>& record) {
  const std::vector<HeldValue>& held = record->held;
  std::vector<Edge> edges(held.size());
  if (held.empty()) return edges;
  plan_levels(*record);
  record->consumed.resize(record->tape.nodes.size(), 0);
  for (const BatchRecord& batch : record->batches) {
    if (batch.needs_grad) record->num_unconsumed += batch.count;
  }
  const at::AutoGradMode grad_mode(true);
  ReachFinder finder(*record);
  std::vector<std::map<uint32_t, Reach>> reach;
  for (const HeldValue& h : held) reach.push_back(finder.find(h));
  // The order in which nodes are made is the reverse of the order in which the engine runs them.
  using Exit = decltype(compat::make_node<ExitNode>(record, 0u, record->tape.values[0]));
  std::vector<std::map<uint32_t, Exit>> exits(held.size());
  for (uint32_t level = 0; level < record->levels.size(); ++level) {
    for (size_t h = 0; h < held.size(); ++h) {
      if (reach[h].count(level) == 0) continue;
      exits[h].emplace(
          level, compat::make_node<ExitNode>(record, level, record->tape.values[held[h].value]));
    }
  }
  std::vector<size_t> by_level(held.size());
  for (size_t h = 0; h < held.size(); ++h) by_level[h] = h;
  std::stable_sort(by_level.begin(), by_level.end(),
                   [&](size_t a, size_t b) { return held[a].level < held[b].level; });
  for (size_t h : by_level) {
    compat::NodePtr below;
    for (auto& [level, exit] : exits[h]) {
      exit->connect(reach[h].at(level), edges, below);
      below = exit;
    }
    const Value& value = record->tape.values[held[h].value];
    const std::string op =
        value.is_outside() ? "view"
                           : record->tape.nodes[value.node].signature->op->handle.schema().name();
    auto node = compat::make_node<HeldNode>(record, held[h], op);
    node->add_next_edge(Edge(below, 0));
    edges[h] = Edge(std::move(node), 0);
  }
  return edges;
}

}  // namespace autobatch

#include "autobatch/autograd.h"

#include "autobatch/op_info.h"
#include "autobatch/scope.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace autobatch {
namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;

uint32_t add_metadata(torch::autograd::Node& node, const Value& value) {
  return node.add_input_metadata(at::TensorOptions().dtype(value.dtype).device(value.device),
                                 c10::fromIntArrayRefUnchecked(value.geometry->sizes), false, false,
                                 value.dtype);
}

// The outside tensors that require grad, in the order of the exit node's edges.
std::vector<uint32_t> differentiable_outside(const FlushRecord& record) {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < record.tape.outside.size(); ++i) {
    if (record.tape.values[record.tape.outside[i].value].requires_grad) out.push_back(i);
  }
  return out;
}

// Where gradients of outside tensors leave: runs after every level that takes part, so that a
// weight gets one gradient a backward, and in few GEMMs.
class ExitNode final : public torch::autograd::Node {
 public:
  explicit ExitNode(std::shared_ptr<FlushRecord> record)
      : record_(std::move(record)), outside_(differentiable_outside(*record_)) {
    for (uint32_t i : outside_) {
      add_next_edge(torch::autograd::impl::gradient_edge(record_->tape.outside[i].tensor));
    }
    add_input_metadata(undefined_input{});  // levels pass no tensor, only order
  }

  std::string name() const override { return "AutobatchExit"; }

  std::vector<uint8_t> wanted_outside() const {
    std::vector<uint8_t> wanted(record_->tape.outside.size(), 0);
    for (size_t e = 0; e < outside_.size(); ++e) {
      wanted[outside_[e]] = task_should_compute_output(e) ? 1 : 0;
    }
    return wanted;
  }

 private:
  variable_list apply(variable_list&&) override {
    const std::lock_guard<std::mutex> lock(record_->mutex);
    variable_list grads(outside_.size());
    const auto found = record_->tasks.find(torch::autograd::get_current_graph_task_id());
    if (found == record_->tasks.end()) return grads;
    BackwardTask& task = *found->second;
    const at::AutoGradMode no_grad(false);
    run_products(*record_, task);
    for (size_t e = 0; e < outside_.size(); ++e) {
      const at::Tensor& flat = task.outside_grads[outside_[e]];
      if (!flat.defined() || !task.outside_wanted[outside_[e]]) continue;
      const Value& value = record_->tape.values[record_->tape.outside[outside_[e]].value];
      grads[e] = flat.as_strided(value.geometry->sizes, value.geometry->strides, 0);
    }
    task.outside_grads.clear();
    task.outside_grads.resize(record_->tape.outside.size());
    return grads;
  }

  std::shared_ptr<FlushRecord> record_;
  std::vector<uint32_t> outside_;
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
// hooks, retain_grad and autograd.grad with respect to it work as in eager.
class HeldNode final : public torch::autograd::Node {
 public:
  // `op` by its schema's name, "aten::tanh".
  HeldNode(const std::string& op, const Value& value, Edge level)
      : op_(op.substr(op.rfind(':') + 1)) {
    add_next_edge(std::move(level));
    add_metadata(*this, value);
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
  variable_list apply(variable_list&& grads) override { return std::move(grads); }

  std::string op_;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> guarded_;
};

// Runs the backward of one level's nodes for whichever held values a gradient has reached.
class LevelNode final : public torch::autograd::Node {
 public:
  LevelNode(std::shared_ptr<FlushRecord> record, uint32_t level, compat::NodePtr exit,
            compat::NodePtr below)
      : record_(std::move(record)), level_(level), exit_(static_cast<ExitNode*>(exit.get())) {
    add_next_edge(Edge(std::move(exit), 0));
    if (below) {
      add_next_edge(Edge(std::move(below), 0));
    }
    first_export_ = num_outputs();
    add_input_metadata(undefined_input{});  // order only: from the level above
  }

  std::string name() const override { return "AutobatchLevel" + std::to_string(level_); }

  // The gradient of held value `held` arrives at the returned input.
  uint32_t add_held(uint32_t held) {
    held_.push_back(held);
    const Value& value = record_->tape.values[record_->held[held].value];
    return add_metadata(*this, value);
  }
  void add_export(const Edge& held) { add_next_edge(held); }

 private:
  variable_list apply(variable_list&& grads) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !c10::GradMode::is_enabled(),
        "torch_autobatch: backward with create_graph=True through a batch() block is not "
        "supported yet. Compute this loss outside batch(), or with batch(enabled=False).");
    const std::lock_guard<std::mutex> lock(record_->mutex);
    BackwardTask& task = current_task();
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    const Level& level = record_->levels[level_];
    task.export_grads.assign(level.exports.size(), at::Tensor());
    task.export_reached.assign(level.exports.size(), 0);
    GradientSink sink(*record_, task, level_);
    for (size_t i = 0; i < held_.size(); ++i) {
      const at::Tensor& grad = grads[i + 1];
      if (!grad.defined()) continue;
      const ValueId id = record_->held[held_[i]].value;
      scatter_add(plain(grad.to(record_->tape.values[id].dtype)), {sink.target_behind(id)});
    }
    const bool keep_graph = torch::autograd::get_current_graph_task_keep_graph();
    run_level(*record_, task, level_, keep_graph);
    variable_list out(num_outputs());
    for (size_t e = 0; e < level.exports.size(); ++e) {
      if (task.export_reached[e]) out[first_export_ + e] = exported(level.exports[e], task, e);
    }
    task.export_grads.clear();
    return out;
  }

  at::Tensor exported(const Export& exported, const BackwardTask& task, size_t e) const {
    const Value& value = record_->tape.values[exported.value];
    return task.export_grads[e]
        .as_strided(value.geometry->sizes, value.geometry->strides, value.offset)
        .clone(at::MemoryFormat::Contiguous);
  }

  BackwardTask& current_task() {
    const int id = torch::autograd::get_current_graph_task_id();
    std::unique_ptr<BackwardTask>& task = record_->tasks[id];
    if (task == nullptr) {
      task = make_task(*record_, exit_->wanted_outside());
      if (Scope* scope = Scope::current()) ++scope->report().backward_calls;
      // When the pass ends, whether the exit node took part in it or not.
      torch::autograd::Engine::get_default_engine().queue_callback([record = record_, id] {
        const std::lock_guard<std::mutex> lock(record->mutex);
        record->tasks.erase(id);
        if (record->num_unconsumed == 0 && record->tasks.empty()) record->free_saved();
      });
    }
    return *task;
  }

  std::shared_ptr<FlushRecord> record_;
  uint32_t level_;
  ExitNode* exit_;  // kept alive by the edge
  size_t first_export_ = 0;
  std::vector<uint32_t> held_;
};

// --- levels ---

// Marks the held values that a node reads, directly or through views. False if there is none.
bool mark_held(FlushRecord& record) {
  std::vector<uint8_t> held(record.tape.values.size(), 0);
  for (const HeldValue& h : record.held) {
    held[h.value] = !record.tape.values[h.value].geometry->overlapping;
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
  if (any) record.is_held = std::move(held);
  return any;
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
    }
  }
}

uint32_t node_level(const FlushRecord& record, NodeId node) {
  return record.value_level.empty() ? 0 : record.value_level[record.tape.nodes[node].first_value];
}

// Notes that `level` sends gradients to the held value that `id` is reached through.
void note_export(FlushRecord& record, uint32_t level, ValueId id) {
  const ValueId cut = id == kNone ? kNone : record.cut(id);
  if (cut == kNone) return;
  std::vector<Export>& exports = record.levels[level].exports;
  const uint64_t key = (static_cast<uint64_t>(level) << 32) | cut;
  if (!record.export_index.emplace(key, static_cast<uint32_t>(exports.size())).second) return;
  const auto held = std::find_if(record.held.begin(), record.held.end(),
                                 [&](const HeldValue& h) { return h.value == cut; });
  exports.push_back({cut, static_cast<uint32_t>(held - record.held.begin())});
}

void plan_single_level(FlushRecord& record) {
  Level& level = record.levels.emplace_back();
  record.level_order = record.order;
  for (uint32_t b = 0; b < record.batches.size(); ++b) {
    level.parts.push_back({b, record.batches[b].first, record.batches[b].count});
  }
}

void plan_levels(FlushRecord& record) {
  if (!mark_held(record)) return plan_single_level(record);
  assign_levels(record);
  uint32_t top = 0;
  for (NodeId node : record.order) top = std::max(top, node_level(record, node));
  for (HeldValue& h : record.held) {
    h.level = record.value_level[h.value];
    top = std::max(top, h.level);
  }
  record.levels.resize(top + 1);
  // Batch by batch, so that each level keeps the schedule's order.
  std::vector<std::vector<NodeId>> members(top + 1);
  for (uint32_t b = 0; b < record.batches.size(); ++b) {
    const BatchRecord& batch = record.batches[b];
    std::vector<uint32_t> used;
    for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
      const NodeId node = record.order[i];
      const uint32_t level = node_level(record, node);
      if (members[level].empty()) used.push_back(level);
      members[level].push_back(node);
      for (ValueId id : record.tape.operands_of(record.tape.nodes[node])) {
        if (id != kNone && record.tape.values[id].requires_grad) note_export(record, level, id);
      }
    }
    for (uint32_t level : used) {
      const auto first = static_cast<uint32_t>(record.level_order.size());
      record.level_order.insert(record.level_order.end(), members[level].begin(),
                                members[level].end());
      record.levels[level].parts.push_back(
          {b, first, static_cast<uint32_t>(members[level].size())});
      members[level].clear();
    }
  }
  for (const HeldValue& h : record.held) {
    note_export(record, h.level, record.tape.values[h.value].parent);
  }
}

}  // namespace

std::vector<Edge> make_autograd_nodes(const std::shared_ptr<FlushRecord>& record) {
  std::vector<Edge> edges;
  if (record->held.empty()) return edges;
  plan_levels(*record);
  record->consumed.resize(record->tape.nodes.size(), 0);
  for (const BatchRecord& batch : record->batches) {
    if (batch.needs_grad) record->num_unconsumed += batch.count;
  }
  const at::AutoGradMode grad_mode(true);
  const compat::NodePtr exit = compat::make_node<ExitNode>(record);
  std::vector<std::vector<uint32_t>> held_of(record->levels.size());
  for (uint32_t h = 0; h < record->held.size(); ++h) held_of[record->held[h].level].push_back(h);
  edges.resize(record->held.size());
  compat::NodePtr below;
  for (uint32_t level = 0; level < record->levels.size(); ++level) {
    auto node = compat::make_node<LevelNode>(record, level, exit, below);
    for (const Export& exported : record->levels[level].exports) {
      node->add_export(edges[exported.held]);
    }
    std::vector<uint32_t> inputs;
    for (uint32_t h : held_of[level]) inputs.push_back(node->add_held(h));
    below = node;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const uint32_t h = held_of[level][i];
      const Value& value = record->tape.values[record->held[h].value];
      const std::string op =
          value.is_outside() ? "view"
                             : record->tape.nodes[value.node].signature->op->handle.schema().name();
      edges[h] = Edge(compat::make_node<HeldNode>(op, value, Edge(below, inputs[i])), 0);
    }
  }
  return edges;
}

}  // namespace autobatch

#include "autobatch/backward/autograd_nodes.h"

#include "autobatch/backward/consumed_nodes.h"
#include "autobatch/backward/levels.h"
#include "autobatch/backward/recompute.h"
#include "autobatch/backward/saved_tensor_check.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/kernels/region_kinds.h"
#include "autobatch/rules/rule.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace autobatch {
namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;

uint32_t add_metadata(torch::autograd::Node& node, const Value& value) {
  return node.add_input_metadata(value.options(),
                                 c10::fromIntArrayRefUnchecked(value.geometry->sizes), false, false,
                                 value.dtype);
}

// Returns, for each graph input, whether the running pass needs the gradient of the graph input.
std::vector<uint8_t> wanted_graph_input(const FlushRecord& record) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  std::vector<uint8_t> wanted(record.tape.graph_inputs.size(), 0);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const GraphInput& graph_input = record.tape.graph_inputs[i];
    if (graph_input.gradient_to == nullptr) continue;
    wanted[i] = 1;
    if (chosen == nullptr || chosen->empty()) continue;
    const auto found = chosen->find(const_cast<torch::autograd::Node*>(graph_input.gradient_to));
    wanted[i] = found != chosen->end() && found->second.should_execute() ? 1 : 0;
  }
  return wanted;
}

// Returns, for each level, the number of feeders (FlushRecord::feeders) that the running pass
// executes.
std::vector<uint32_t> feeders_of_this_pass(const FlushRecord& record) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto* all = torch::autograd::get_current_graph_task_nodes_in_graph();
  std::vector<uint32_t> count(record.levels.size(), 0);
  for (const auto& [feeder, level] : record.feeders) {
    auto* node = static_cast<torch::autograd::Node*>(const_cast<void*>(feeder));
    if (all == nullptr || all->count(node) == 0) continue;
    if (chosen != nullptr && !chosen->empty()) {
      const auto found = chosen->find(node);
      if (found == chosen->end() || !found->second.should_execute()) continue;
    }
    ++count[level];
  }
  return count;
}

// Whether the gradient belongs to a transform that handles each op separately. Such transforms are
// vmap (`is_grads_batched`), the other functorch transforms, forward-mode AD and tensor subclasses.
bool is_transformed(const at::Tensor& gradient) {
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Python});
  const auto* meta = torch::autograd::impl::get_autograd_meta(gradient);
  return gradient.key_set().has_any(kTransforms) || (meta != nullptr && meta->fw_grad_ != nullptr);
}

// Returns the state of the running pass. The first call creates the state. A callback of autograd's
// engine deletes the state when the pass ends.
BackwardTask& current_task(const std::shared_ptr<FlushRecord>& record) {
  const int id = torch::autograd::get_current_graph_task_id();
  std::unique_ptr<BackwardTask>& task = record->tasks[id];
  if (task == nullptr) {
    task = make_task(*record, wanted_graph_input(*record));
    task->feeders_left = feeders_of_this_pass(*record);
    note_backward_call();
    torch::autograd::Engine::get_default_engine().queue_callback([record, id] {
      const std::lock_guard<std::mutex> lock(record->mutex);
      record->tasks.erase(id);
      if (record->num_unconsumed == 0 && record->tasks.empty()) record->free_saved();
    });
  }
  return *task;
}

// Returns the gradient collected so far for graph input `i`, and clears the stored gradient.
// Returns an undefined tensor if there is no gradient.
at::Tensor take_graph_input(const FlushRecord& record, BackwardTask& task, uint32_t i) {
  if (!task.graph_input_wanted[i] || !task.graph_input_grads[i].defined()) return {};
  const at::Tensor flat = std::exchange(task.graph_input_grads[i], at::Tensor());
  const Geometry& g = *record.tape.values[record.tape.graph_inputs[i].value].geometry;
  const at::Tensor gradient = flat.as_strided(g.sizes, g.strides, 0);
  // The graph input may have gaps in memory, but the gradient has no gaps.
  if (g.extent != g.numel) return gradient.contiguous();
  return detached_alias(gradient);  // the user must not get a view of the buffer
}

void count_down(uint32_t& left) {
  if (left > 0) --left;
}

void add_to(at::Tensor& sum, at::Tensor gradient) {
  if (!gradient.defined()) return;
  sum = sum.defined() ? sum + gradient : std::move(gradient);
}

bool is_shared(const FlushRecord& record, uint32_t graph_input) {
  return record.tape.graph_inputs[graph_input].is_weight &&
         record.tape.graph_inputs[graph_input].edge.is_valid();
}

// Passes on the gradients of a set of weights, for all ExitNodes from which gradients flow to this
// set. An ExitNode needs one edge to the WeightsNode, instead of one edge to each weight. A
// WeightsNode is created before its ExitNodes, so the engine runs it after all ExitNodes of a pass.
class WeightsNode final : public torch::autograd::Node {
 public:
  WeightsNode(std::shared_ptr<FlushRecord> record, std::vector<uint32_t> weights)
      : record_(std::move(record)), weights_(std::move(weights)) {
    add_metadata(*this, record_->tape.values[record_->tape.graph_inputs[weights_[0]].value]);
    for (uint32_t i : weights_) add_next_edge(record_->tape.graph_inputs[i].edge);
  }

  std::string name() const override { return "AutobatchWeights"; }
  void collect(Recompute::Edges& edges) const {
    for (size_t k = 0; k < weights_.size(); ++k) edges.graph_inputs[weights_[k]] = next_edge(k);
  }

 private:
  variable_list apply(variable_list&&) override {
    const std::lock_guard<std::mutex> lock(record_->mutex);
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    BackwardTask& task = current_task(record_);
    variable_list out;
    for (uint32_t i : weights_) {
      out.push_back(take_graph_input(*record_, task, i));
      if (task.replay != nullptr) add_to(out.back(), task.replay->take_graph_input(i));
    }
    return out;
  }

  std::shared_ptr<FlushRecord> record_;
  std::vector<uint32_t> weights_;
};

// The node through which gradients leave a level. Held values whose gradients flow from a level to
// the same destinations share an ExitNode. The first ExitNode of a level that the engine runs
// computes the level for all held values that a gradient has reached. All HeldNodes must run before
// this ExitNode. The engine first runs the nodes that were created last, so an ExitNode is created
// before the HeldNodes. (This can fail if readers of a held value were recorded on another thread
// or are on another device. Levels then run again for late gradients.) An ExitNode has edges only
// to the destinations of its own held values. So autograd nodes on which only other instances
// depend do not run.
class ExitNode final : public torch::autograd::Node {
 public:
  ExitNode(std::shared_ptr<FlushRecord> record, uint32_t level, const Value& held)
      : record_(std::move(record)), level_(level) {
    add_metadata(*this, held);  // the edge passes no gradient, but sets order and device
  }

  std::string name() const override { return "AutobatchExit"; }

  // `held_edges`: the edges of the record's held values. `below`: the ExitNode of the same held
  // values at the next lower level. `weights`: the WeightsNode of the weights in `reach`, or null
  // if `reach` has no weights.
  void connect(Reach reach, const std::vector<Edge>& held_edges, compat::NodePtr below,
               const compat::NodePtr& weights) {
    reach_ = std::move(reach);
    if (weights)
      std::erase_if(reach_.graph_inputs, [&](uint32_t i) { return is_shared(*record_, i); });
    for (uint32_t i : reach_.graph_inputs) {
      add_next_edge(record_->tape.graph_inputs[i].edge);
    }
    for (uint32_t e : reach_.exports) add_next_edge(held_edges[record_->exports[e].held]);
    has_below_ = below != nullptr;
    if (below) add_next_edge(Edge(std::move(below), 0));
    if (weights) add_next_edge(Edge(weights, 0));
  }

  bool is_connected() const { return num_outputs() != 0; }

  // Adds to `edges` the edges that leave this level and the levels below this level.
  void collect(Recompute::Edges& edges) const {
    size_t next = 0;
    for (uint32_t i : reach_.graph_inputs) edges.graph_inputs[i] = next_edge(next++);
    for (uint32_t e : reach_.exports) edges.cuts[record_->exports[e].value] = next_edge(next++);
    const size_t weights = next + (has_below_ ? 1 : 0);
    if (weights < num_outputs()) {
      static_cast<const WeightsNode&>(*next_edge(weights).function).collect(edges);
    }
    if (has_below_) static_cast<const ExitNode&>(*next_edge(next).function).collect(edges);
  }

 private:
  variable_list apply(variable_list&&) override {
    const std::lock_guard<std::mutex> lock(record_->mutex);
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    BackwardTask& task = current_task(record_);
    if (level_ > 0) count_down(task.feeders_left[level_ - 1]);
    variable_list out(num_outputs());
    if (!c10::GradMode::is_enabled()) take_batched(task, out);
    if (task.replay != nullptr) replay(*task.replay, out);
    return out;
  }

  void take_batched(BackwardTask& task, variable_list& out) const {
    if (!task.level_done[level_]) {
      run_levels(*record_, task, level_, torch::autograd::get_current_graph_task_keep_graph());
    }
    size_t next = 0;
    for (uint32_t i : reach_.graph_inputs) out[next++] = take_graph_input(*record_, task, i);
    take_exports(task, out, next);
  }

  // Runs again, one by one, the ops that the held values depend on, and computes gradients through
  // these ops. Called if autograd (create_graph=True) or a transform must see each op.
  void replay(Recompute& replay, variable_list& out) const {
    const bool any = replay.differentiate();
    if (any && !torch::autograd::get_current_graph_task_keep_graph()) {
      note_recomputed(*record_, replay.nodes());
    }
    size_t next = 0;
    for (uint32_t i : reach_.graph_inputs) add_to(out[next++], replay.take_graph_input(i));
    for (uint32_t e : reach_.exports) {
      add_to(out[next++], replay.take_cut(record_->exports[e].value));
    }
  }

  // Writes the gradients of this level's exports to `out`, starting at index `next`. The gradients
  // are row-major copies, because the engine may pass them to hooks. One call makes all copies that
  // have the same dtype and device.
  void take_exports(BackwardTask& task, variable_list& out, size_t next) const {
    if (reach_.exports.empty()) return;
    std::vector<at::Tensor> taken;
    taken.reserve(reach_.exports.size());
    GeometryTable geometries;
    Regions from, to;
    for (const uint32_t e : reach_.exports) {
      at::Tensor& own = out[next++];
      if (!task.export_grads[e].defined()) continue;
      const at::Tensor& flat =
          taken.emplace_back(std::exchange(task.export_grads[e], at::Tensor()));
      const LevelExport& gradient = record_->exports[e];
      own = at::empty(gradient.geometry->sizes, flat.options());
      from.push_back({&flat, gradient.offset, gradient.geometry});
      to.push_back({&own, 0, geometries.intern_contiguous(own.sizes())});
    }
    for_each_kind(from, to, copy_regions);
  }

  std::shared_ptr<FlushRecord> record_;
  uint32_t level_;
  Reach reach_;
  bool has_below_ = false;
};

// Calls a hook of a held value only if at least one gradient is defined. If a pass computes
// gradients only for other instances, the HeldNode gets undefined gradients. In eager mode, the
// held value's node would not run in such a pass. So the hook must not run either.
class ReachedOnlyHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit ReachedOnlyHook(torch::autograd::FunctionPreHook* hook) : hook_(hook) {}
  variable_list operator()(const variable_list& grads) override {
    const bool reached = std::any_of(grads.begin(), grads.end(),
                                     [](const at::Tensor& grad) { return grad.defined(); });
    return reached ? (*hook_)(grads) : grads;
  }

 private:
  torch::autograd::FunctionPreHook* hook_;
};

// The grad_fn of a held value, or of several values that one autograd node computes in eager mode.
// The gradient of everything computed from these values passes through this node, so hooks,
// retain_grad and autograd.grad with respect to the values work as in eager mode. Backward runs a
// level once for the gradients of all its held values.
class HeldNode final : public torch::autograd::Node {
 public:
  // `op`: the schema's name, such as "aten::tanh".
  HeldNode(std::shared_ptr<FlushRecord> record, const std::string& op)
      : record_(std::move(record)), op_(op.substr(op.rfind(':') + 1)) {}

  // Adds a held value. Returns the edge to this node for readers of the value. `self`: the pointer
  // that owns this node.
  Edge add(const HeldValue& held, const compat::NodePtr& self) {
    held_.push_back(held);
    return Edge(self, add_metadata(*this, record_->tape.values[held.value]));
  }

  std::string name() const override { return "AutobatchBackward[" + op_ + "]"; }

  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept
      override {
    guarded_.clear();
    for (const auto& hook : Node::tensor_pre_hooks()) {
      guarded_.push_back(std::make_unique<ReachedOnlyHook>(hook.get()));
    }
    return guarded_;
  }

 private:
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(record_->mutex);
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    BackwardTask& task = current_task(record_);
    for (size_t k = 0; k < held_.size(); ++k) {
      count_down(task.feeders_left[held_[k].level]);
    }
    for (size_t k = 0; k < held_.size(); ++k) {
      if (!grads[k].defined()) continue;
      if (c10::GradMode::is_enabled() || is_transformed(grads[k])) {
        add_root(task, held_[k], grads[k]);
      } else {
        add(task, held_[k], grads[k]);
      }
    }
    return {at::Tensor()};
  }

  void add(BackwardTask& task, const HeldValue& held, const at::Tensor& gradient) {
    const at::AutoGradMode no_grad(false);
    expect_gradient(*record_, task, held.level,
                    torch::autograd::get_current_graph_task_keep_graph());
    const at::Tensor grad = gradient.to(record_->tape.values[held.value].dtype);
    task.arrived.push_back({held.level, held.value, plain(grad)});
  }

  // Stores the gradient for the ExitNode, which runs the ops again.
  void add_root(BackwardTask& task, const HeldValue& held, const at::Tensor& grad) {
    if (task.replay == nullptr) task.replay = std::make_unique<Recompute>(*record_, task.unseen);
    Recompute::Edges edges;
    static_cast<const ExitNode&>(*next_edge(0).function).collect(edges);
    task.replay->add_root(held.value, grad, edges);
  }

  std::shared_ptr<FlushRecord> record_;
  std::vector<HeldValue> held_;
  std::string op_;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> guarded_;
};

// A key that represents a value's autograd node in eager mode. Two values have equal keys if and
// only if they are results of the same autograd node. Examples are the pieces of one split, and the
// results of one op.
using Origin = std::tuple<uint64_t, uint64_t, uint64_t>;
Origin origin_of(const Tape& tape, ValueId id) {
  const Value& value = tape.values[id];
  if (value.parent != kNone && value.call != 0) return {1, value.parent, value.call};
  if (value.parent == kNone && !value.is_graph_input() && tape.nodes[value.node].num_values > 1) {
    return {2, value.node, first_of_one_node(tape, tape.nodes[value.node], value.index)};
  }
  return {0, id, 0};
}

std::string name_of(const Tape& tape, ValueId id) {
  const Value& value = tape.values[id];
  if (value.is_graph_input()) return "view";
  const std::string& op = tape.nodes[value.node].signature->op->name;  // "aten::add.Tensor"
  return op.substr(0, op.find('.'));
}

// Removes the gradient edges from the tape's graph inputs. Each ExitNode then owns the autograd
// nodes that its own held values depend on, and the record owns none of these nodes. If the record
// owned them, there could be a reference cycle: a node may have saved a tensor that later depends
// on another value of the flush.
void leave_edges_to_exits(Tape& tape) {
  for (GraphInput& graph_input : tape.graph_inputs) {
    graph_input.gradient_to = graph_input.edge.function.get();
    graph_input.edge = Edge();
  }
}

// Returns, for each held value and level, the WeightsNode of the weights to which the held value's
// gradient flows from the level. There is one WeightsNode for each set of weights.
std::vector<std::map<uint32_t, compat::NodePtr>> make_weights(
    const std::shared_ptr<FlushRecord>& record,
    const std::vector<std::map<uint32_t, Reach>>& reach) {
  std::map<std::vector<uint32_t>, compat::NodePtr> known;
  std::vector<std::map<uint32_t, compat::NodePtr>> made(reach.size());
  for (size_t h = 0; h < reach.size(); ++h) {
    for (const auto& [level, of_level] : reach[h]) {
      std::vector<uint32_t> weights;
      for (uint32_t i : of_level.graph_inputs) {
        if (is_shared(*record, i)) weights.push_back(i);
      }
      std::sort(weights.begin(), weights.end());
      compat::NodePtr& node = known[weights];
      if (node == nullptr && !weights.empty()) {
        node = compat::make_node<WeightsNode>(record, weights);
      }
      made[h][level] = node;
    }
  }
  return made;
}

using Exit = decltype(compat::make_node<ExitNode>(std::shared_ptr<FlushRecord>(), 0u, Value()));

// Returns the ExitNode of each held value at each level. Held values of one device share an
// ExitNode if their gradients have the same destinations at this level and at all lower levels.
std::vector<std::map<uint32_t, Exit>> make_exits(
    const std::shared_ptr<FlushRecord>& record,
    const std::vector<std::map<uint32_t, Reach>>& reach) {
  std::vector<std::vector<size_t>> of_level(record->levels.size());
  for (size_t h = 0; h < reach.size(); ++h) {
    for (const auto& entry : reach[h]) of_level[entry.first].push_back(h);
  }
  std::vector<std::map<uint32_t, Exit>> exits(reach.size());
  for (uint32_t level = 0; level < of_level.size(); ++level) {
    using Shared = std::tuple<std::vector<uint32_t>, std::vector<uint32_t>, const void*,
                              c10::DeviceType, c10::DeviceIndex>;
    std::map<Shared, Exit> known;
    for (const size_t h : of_level[level]) {
      const Reach& here = reach[h].at(level);
      const void* below = exits[h].empty() ? nullptr : exits[h].rbegin()->second.get();
      const Value& value = record->tape.values[record->held[h].value];
      Exit& exit = known[{here.graph_inputs, here.exports, below, value.device.type(),
                          value.device.index()}];
      if (exit == nullptr) {
        exit = compat::make_node<ExitNode>(record, level, value);
        if (level > 0) record->feeders.emplace_back(exit.get(), level - 1);
      }
      exits[h].emplace(level, exit);
    }
  }
  return exits;
}

}  // namespace

std::vector<Edge> make_autograd_nodes(const std::shared_ptr<FlushRecord>& record,
                                      const std::vector<HiddenRoot>& hidden,
                                      const std::vector<Edge>& leaves) {
  const std::vector<HeldValue>& held = record->held;
  std::vector<Edge> edges(held.size() + hidden.size());
  if (held.empty()) return edges;
  plan_levels(*record);
  divide_parts(*record);
  init_consumed(*record);
  const at::AutoGradMode grad_mode(true);
  std::vector<std::map<uint32_t, Reach>> reach = find_reach(*record);
  for (size_t h = 0; h < held.size(); ++h) {
    edges[h] = leaves[h];
    if (leaves[h].is_valid()) reach[h].clear();  // the gradient ends at the leaf
  }
  // The engine first runs the nodes that were created last. So the nodes that must run first are
  // created last.
  const std::vector<std::map<uint32_t, compat::NodePtr>> weights = make_weights(record, reach);
  std::vector<std::map<uint32_t, Exit>> exits = make_exits(record, reach);
  using Held = decltype(compat::make_node<HeldNode>(record, std::string()));
  const auto make = [&](ValueId value, const compat::NodePtr& below) {
    Held node = compat::make_node<HeldNode>(record, name_of(record->tape, value));
    node->add_next_edge(Edge(below, 0));
    return node;
  };
  const auto add = [&](const Held& node, const HeldValue& value) {
    record->feeders.emplace_back(node.get(), value.level);
    return node->add(value, node);
  };
  std::map<Origin, Held> nodes;
  std::multimap<size_t, size_t> roots;  // indices into `hidden`, by HiddenRoot::view
  for (size_t r = 0; r < hidden.size(); ++r) roots.emplace(hidden[r].view, r);
  std::vector<size_t> by_level(held.size());
  for (size_t h = 0; h < held.size(); ++h) by_level[h] = h;
  std::stable_sort(by_level.begin(), by_level.end(),
                   [&](size_t a, size_t b) { return held[a].level < held[b].level; });
  for (size_t h : by_level) {
    if (leaves[h].is_valid()) continue;
    compat::NodePtr below;
    for (auto& [level, exit] : exits[h]) {
      if (!exit->is_connected()) {
        exit->connect(reach[h].at(level), edges, below, weights[h].at(level));
      }
      below = exit;
    }
    auto [entry, is_first] = nodes.try_emplace(origin_of(record->tape, held[h].value));
    if (is_first) entry->second = make(held[h].value, below);
    edges[h] = add(entry->second, held[h]);
    const auto [first, last] = roots.equal_range(h);
    for (auto root = first; root != last; ++root) {
      const ValueId value = hidden[root->second].value;
      const Held node = make(value, below);
      edges[held.size() + root->second] = add(node, {value, held[h].level});
    }
  }
  leave_edges_to_exits(record->tape);
  return edges;
}

}  // namespace autobatch

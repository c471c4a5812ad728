#include "autobatch/derivatives/captured_gradient.h"

#include "autobatch/backward/backward.h"
#include "autobatch/backward/consumed_nodes.h"
#include "autobatch/backward/saved_tensor_check.h"
#include "autobatch/backward/view_gradient.h"
#include "autobatch/capture/capture.h"
#include "autobatch/capture/deferred_writes.h"
#include "autobatch/capture/record_call.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/derivatives/derivative_formula.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/rules/rule.h"
#include "autobatch/scope/scope.h"

#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace autobatch {
namespace {

using torch::autograd::Edge;

// While an object of this class exists, an operation that would flush raises an error.
class NoFlushGuard {
 public:
  NoFlushGuard() { CaptureState::current().may_flush = false; }
  ~NoFlushGuard() { CaptureState::current().may_flush = true; }
  NoFlushGuard(const NoFlushGuard&) = delete;
  NoFlushGuard& operator=(const NoFlushGuard&) = delete;
};

// Returns the nodes that the gradients of the roots pass through, in order of capture. Omits the
// nodes whose results have value numbers less than `first`. Calls `meet` once for each graph input
// that these gradients reach, with its value. Returns nothing if a call of `meet` returns false.
template <class Meet>
std::optional<std::vector<NodeId>> nodes_behind(const Tape& tape, at::ArrayRef<ValueId> roots,
                                                ValueId first, const Meet& meet) {
  std::unordered_set<NodeId> seen;
  std::unordered_set<ValueId> graph_inputs;
  std::vector<NodeId> waiting, nodes;
  const auto reach = [&](ValueId id) {
    if (id == kNone || !tape.values[id].requires_grad) return true;
    const ValueId base = tape.values[id].base;
    const NodeId node = tape.values[base].node;
    if (node == kNone) return !graph_inputs.insert(base).second || meet(base);
    if (base >= first && seen.insert(node).second) waiting.push_back(node);
    return true;
  };
  for (const ValueId root : roots) {
    if (!reach(root)) return std::nullopt;
  }
  while (!waiting.empty()) {
    nodes.push_back(waiting.back());
    waiting.pop_back();
    for (const ValueId operand : tape.operands_of(tape.nodes[nodes.back()])) {
      if (!reach(operand)) return std::nullopt;
    }
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

bool has_hooks(torch::autograd::Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

// Returns this thread's formulas for the tables of `scope`. The keys of the formulas refer to
// signatures and geometries in these tables.
FormulaTable& formulas_of(const Scope& scope) {
  static thread_local std::weak_ptr<Tables> tables;
  static thread_local FormulaTable formulas;
  if (tables.lock() != scope.shared_tables()) {
    tables = scope.shared_tables();
    formulas = FormulaTable();
  }
  return formulas;
}

class Derivation {
 public:
  Derivation(Scope& scope, const DeriveOptions& options)
      : scope_(scope), graph_(scope.graph()), options_(options) {}

  bool run(at::ArrayRef<at::Tensor> outputs, at::ArrayRef<at::Tensor> gradients,
           at::ArrayRef<at::Tensor> inputs) {
    if (!find_inputs(inputs)) return false;
    std::vector<ValueId> roots;
    for (const at::Tensor& output : outputs) {
      const PendingTensor* pending = as_pending(output);
      if (pending == nullptr || pending->graph() != &graph_) return false;
      roots.push_back(graph_.value_of(output));
      if (!output.requires_grad() || !value(roots.back()).requires_grad) return false;
    }
    find_overwritten();
    if (!find_nodes(roots)) return false;
    // The ops of formulas must read the values that the nodes read, and not values that were
    // written to the same memory later.
    std::optional<Graph::RawGuard> raw;
    if (graph_.has_writes()) raw.emplace(graph_);
    const at::AutoGradMode grad_mode(options_.create_graph);
    for (size_t i = 0; i < roots.size(); ++i) {
      if (!gradients[i].defined() || gradients[i].scalar_type() != outputs[i].scalar_type() ||
          !add(roots[i], gradients[i])) {
        return false;
      }
    }
    for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
      if (leads_.count(*node) != 0 && !differentiate(*node)) return false;
    }
    for (const at::Tensor& gradient : found_) {
      if (!gradient.defined() && !options_.allow_unused) return false;
      // A pending tensor for a whole graph input is valid only while formulas are applied.
      const PendingTensor* pending = as_pending(gradient);
      if (pending != nullptr && value(pending->value()).is_graph_input() &&
          value(pending->value()).base == pending->value())
        return false;
    }
    if (options_.retain_graph) return true;
    note_captured_gradient(graph_, {leads_.begin(), leads_.end()});
    return true;
  }

  std::vector<at::Tensor> take() { return std::move(found_); }

 private:
  const Value& value(ValueId id) const { return graph_.value(id); }
  const Tape& tape() const { return graph_.tape(); }

  // --- the inputs ---

  bool find_inputs(at::ArrayRef<at::Tensor> inputs) {
    found_.resize(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined() || !inputs[i].requires_grad()) return false;
      if (const PendingTensor* pending = as_pending(inputs[i])) {
        if (pending->graph() != &graph_) return false;
        const ValueId id = pending->value();
        if (!value(id).requires_grad || graph_.memory_of(value(id).base) != nullptr) return false;
        if (value(id).base != id && value(value(id).base).geometry->overlapping) return false;
        if (has_requests(tape(), value(id).base)) return false;
        by_value_.emplace_back(id, i);
        continue;
      }
      const Edge edge = torch::autograd::impl::gradient_edge(inputs[i]);
      if (edge.function == nullptr || has_hooks(*edge.function)) return false;
      by_edge_.emplace_back(edge, i);
    }
    return true;
  }

  template <class Visit>
  void for_inputs_of(ValueId id, const Visit& visit) const {
    for (const auto& [input, i] : by_value_) {
      if (input == id) visit(i);
    }
    if (!value(id).is_graph_input() || value(id).base != id) return;
    const Edge& edge = tape().graph_inputs[value(id).index].edge;
    for (const auto& [input, i] : by_edge_) {
      if (input == edge) visit(i);
    }
  }

  bool is_input(ValueId id) const {
    bool found = false;
    for_inputs_of(id, [&](size_t) { found = true; });
    return found;
  }

  // --- the nodes between the outputs and the inputs ---

  // Finds the nodes that the roots depend on (`nodes_`), and the nodes among them that depend on an
  // input (`leads_`). Returns false if autograd must run.
  bool find_nodes(at::ArrayRef<ValueId> roots) {
    // If all inputs are captured values, no path from a root to an input contains a value that was
    // captured before the first input.
    ValueId first = by_edge_.empty() ? kNone : 0;
    for (const auto& entry : by_value_) first = std::min(first, first_result_beside(entry.first));
    auto nodes = nodes_behind(tape(), roots, first, [&](ValueId id) {
      return is_understood(tape().graph_inputs[value(id).index], id);
    });
    if (!nodes.has_value()) return false;
    nodes_ = *std::move(nodes);
    for (const NodeId id : nodes_) {
      const Node& node = tape().nodes[id];
      if (!is_understood(node)) return false;
      if (depends_on_input_beside(node)) return false;
      const auto operands = tape().operands_of(node);
      const bool leads = std::any_of(operands.begin(), operands.end(), [&](ValueId operand) {
        return operand != kNone && leads_to_input(operand);
      });
      if (!leads) continue;
      if (node.spent && keeps_anything(tape(), node)) return false;
      leads_.insert(id);
    }
    return true;
  }

  // Whether an input of the call is a result of the node from which eager may compute another
  // result of the node. In eager, the gradient of the other result passes through the input.
  bool depends_on_input_beside(const Node& node) const {
    const Rule& rule = *node.signature->rule;
    const bool is_cell = rule.subgraph() != nullptr && node.num_values > 1;
    return std::any_of(by_value_.begin(), by_value_.end(), [&](const auto& input) {
      const uint32_t k = input.first - node.first_value;
      return k < node.num_values && (is_cell || k == rule.result_dependency().from);
    });
  }

  // Returns the first result of the node that computes the value, or `id` itself for a view.
  ValueId first_result_beside(ValueId id) const {
    const NodeId node = value(id).base == id ? value(id).node : kNone;
    return node == kNone ? id : tape().nodes[node].first_value;
  }

  // Finds the values whose memory has been overwritten.
  void find_overwritten() {
    for (const auto& entry : tape().written_at) overwritten_.insert(entry.first);
    for (const auto& [base, memory] : graph_.memories()) {
      overwritten_.insert(base);
      overwritten_.insert(memory.contents.begin(), memory.contents.end());
      if (memory.writes.empty()) overwritten_.erase(memory.content);
    }
  }

  // Whether the node's gradient can be captured. Returns false if eager's autograd might raise an
  // error for this node.
  bool is_understood(const Node& node) const {
    const auto is_overwritten = [&](ValueId id) { return overwritten_.count(value(id).base) != 0; };
    // The user's backward function may write in place and read values.
    if (node.signature->op->is_function) return false;
    for (uint32_t k = 0; k < node.num_values; ++k) {
      if (has_requests(tape(), node.first_value + k)) return false;
    }
    if (node.in_place && node.signature->op->in_place_formula != InPlaceFormula::kSame)
      return false;
    return overwritten_.empty() || find_saved_and_gone(tape(), node, is_overwritten) == kNone;
  }

  // Whether the graph input is unchanged and its autograd history contains no input of
  // autograd.grad. If the graph input is itself such an input, its history must contain no other
  // input.
  bool is_understood(const GraphInput& graph_input, ValueId id) const {
    if (graph_input.counted && graph_input.counter.current_version() != graph_input.version)
      return false;
    if (graph_input.edge.function == nullptr) return true;
    if (has_hooks(*graph_input.edge.function)) return false;
    return is_input(id) ? !leads_further(graph_input.edge) : !may_lead_to_input(graph_input.edge);
  }

  // Whether the history of an input may contain another input.
  bool leads_further(const Edge& edge) const {
    return by_edge_.size() > 1 && may_lead_to_input(edge);
  }

  bool may_lead_to_input(const Edge& edge) const {
    constexpr size_t kMost = 64;  // maximum number of autograd nodes to visit
    std::vector<const torch::autograd::Node*> waiting{edge.function.get()};
    std::unordered_set<const torch::autograd::Node*> seen(waiting.begin(), waiting.end());
    while (!waiting.empty()) {
      const torch::autograd::Node* node = waiting.back();
      waiting.pop_back();
      for (const Edge& next : node->next_edges()) {
        if (next.function == nullptr || !seen.insert(next.function.get()).second) continue;
        if (seen.size() > kMost) return true;
        for (const auto& entry : by_edge_) {
          if (entry.first.function == next.function) return true;
        }
        waiting.push_back(next.function.get());
      }
    }
    return false;
  }

  bool leads_to_input(ValueId id) const {
    if (!value(id).requires_grad) return false;
    for (ValueId v = id; v != kNone; v = value(v).parent) {
      if (is_input(v)) return true;
    }
    const Value& base = value(value(id).base);
    return base.is_graph_input() ? is_input(value(id).base) : leads_.count(base.node) != 0;
  }

  // --- gradients ---

  // Adds `gradient` to the gradient of the value `id` and of all values that `id` is a view of.
  // Returns false if a view has no gradient formula.
  bool add(ValueId id, const at::Tensor& gradient) {
    for (ValueId v = id; v != kNone && value(v).requires_grad; v = value(v).parent) {
      const bool goes_on = value(v).base == v && leads_.count(value(v).node) != 0;
      if (!goes_on && !is_input(v)) continue;
      const auto here = gradient_behind_view(value(id), value(v), gradient);
      if (!here.has_value()) return false;
      for_inputs_of(v, [&](size_t i) { add_to(found_[i], *here); });
      if (goes_on) add_to(gradients_[v], *here);
    }
    return true;
  }

  static void add_to(at::Tensor& sum, const at::Tensor& gradient) {
    sum = sum.defined() ? at::add(sum, gradient) : gradient;
  }

  bool differentiate(NodeId id) {
    const Node node = tape().nodes[id];
    if (node.signature->op == &assemble_op()) return differentiate_assembly(node);
    if (node.signature->op == &with_values_op()) {
      const auto found = gradients_.find(node.first_value);
      const ValueId self = tape().operands[node.first_operand];
      return found == gradients_.end() || add(self, std::move(found->second));
    }
    FormulaRequest request;
    request.signature = node.signature;
    std::vector<ValueId> inputs;
    for (const ValueId operand : tape().operands_of(node)) inputs.push_back(operand);
    std::vector<Value> kept;  // copies, because capture reallocates the tape's values
    for (const ValueId operand : inputs) {
      kept.push_back(operand == kNone ? Value() : value(operand));
      request.wanted.push_back(operand != kNone && leads_to_input(operand) ? 1 : 0);
    }
    for (size_t slot = 0; slot < inputs.size(); ++slot) {
      request.operands.push_back(inputs[slot] == kNone ? nullptr : &kept[slot]);
    }
    std::vector<Value> results;
    bool any = false;
    for (uint32_t k = 0; k < node.num_values; ++k) {
      inputs.push_back(node.first_value + k);
      results.push_back(value(node.first_value + k));
      const auto found = gradients_.find(node.first_value + k);
      request.given.push_back(found != gradients_.end() ? 1 : 0);
      any = any || found != gradients_.end();
    }
    if (!any) return true;
    request.results = results;
    const Formula* formula = formulas_of(scope_).find(scope_, request);
    if (formula == nullptr) return false;
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (formula->reads[i] == 0) {
        tensors.emplace_back();
        continue;
      }
      tensors.push_back(tensor_of(inputs[i]));
      if (!tensors.back().defined()) return false;
    }
    for (uint32_t k = 0; k < node.num_values; ++k) {
      const auto found = gradients_.find(node.first_value + k);
      tensors.push_back(found == gradients_.end() ? at::Tensor() : std::move(found->second));
    }
    const std::vector<at::Tensor> gradients = formula->apply(tensors);
    for (size_t slot = 0; slot < gradients.size(); ++slot) {
      if (gradients[slot].defined() && !add(inputs[slot], gradients[slot])) return false;
    }
    return true;
  }

  // Computes the gradients of the operands of an `assemble` node, which replaces pieces of a base
  // value (deferred_writes.cpp). A piece gets the gradient of the region that it was written to,
  // and the base gets the rest of the gradient.
  bool differentiate_assembly(const Node& node) {
    const auto found = gradients_.find(node.first_value);
    if (found == gradients_.end()) return true;
    const Value whole = value(node.first_value);
    const Geometry& g = *whole.geometry;
    if (g.overlapping || g.extent != g.numel) return false;
    // The gradient gets the memory layout of the whole value.
    std::vector<int64_t> order(g.sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater(), [&](int64_t d) { return g.strides[d]; });
    const at::Tensor gradient = std::move(found->second).permute(order).contiguous();
    const auto operands = tape().operands_of(node);
    const std::vector<ValueId> inputs(operands.begin(), operands.end());
    const size_t count = (inputs.size() - 1) / 2;
    std::vector<std::pair<const Geometry*, int64_t>> places;  // by piece: its geometry and offset
    for (size_t e = 0; e < count; ++e) {
      const Value& place = value(inputs[1 + e]);
      places.emplace_back(place.geometry, place.offset - value(inputs[0]).offset);
    }
    const auto part_of = [](const at::Tensor& t, const Geometry& part, int64_t offset) {
      return t.as_strided(part.sizes, part.strides, t.storage_offset() + offset);
    };
    for (size_t e = 0; e < count; ++e) {
      const ValueId piece = inputs[1 + count + e];
      if (!leads_to_input(piece)) continue;
      if (!add(piece, part_of(gradient, *places[e].first, places[e].second))) return false;
    }
    if (!leads_to_input(inputs[0])) return true;
    std::vector<at::Tensor> parts, zeros;
    for (const auto& [place, offset] : places) {
      parts.push_back(part_of(gradient, *place, offset));
      zeros.push_back(at::zeros({}, whole.options()).expand(place->sizes));
    }
    // The zeros are inserted with autobatch::assemble and not with writes, because reads ignore
    // writes while derivatives are captured (Graph::RawGuard).
    using Assemble = at::Tensor(const at::Tensor&, at::TensorList, at::TensorList);
    const at::Tensor rest = assemble_op().handle.typed<Assemble>().call(gradient, parts, zeros);
    return add(inputs[0], part_of(rest, g, 0));
  }

  // Returns a tensor for a value of the graph. The tensor is undefined if the value's memory may
  // already be freed.
  at::Tensor tensor_of(ValueId id) {
    const Value& of = value(id);
    const Value& base = value(of.base);
    const bool is_there = base.is_graph_input() ? tape().graph_inputs[base.index].data.defined()
                                                : graph_.may_be_read(of.base);
    if (!is_there) return {};
    // Data of the instance becomes a pending tensor. Otherwise a product could treat the data as a
    // weight.
    if (of.is_graph_input() && of.base == id && !of.requires_grad) return make_pending(graph_, id);
    if (!options_.create_graph) {
      // If grad mode is off, eager's view of a tensor that requires grad is a leaf, which would not
      // be captured.
      const Value plain = of;
      return make_pending(graph_, graph_.add_view(id, plain.geometry, plain.offset, false));
    }
    if (base.is_graph_input() && of.base == id) {
      const GraphInput& graph_input = tape().graph_inputs[base.index];
      if (graph_input.is_copy) return {};
      return graph_input.tensor;
    }
    // The user's tensor cannot be used if a later write has changed whether it requires grad.
    if (of.tensor != nullptr && of.tensor->requires_grad() == of.requires_grad) {
      if (auto held = of.tensor->hold()) return at::Tensor(std::move(held));
    }
    return make_pending(graph_, id);
  }

  Scope& scope_;
  Graph& graph_;
  const DeriveOptions& options_;
  std::vector<std::pair<ValueId, size_t>> by_value_;  // captured inputs, with their indices
  std::vector<std::pair<Edge, size_t>> by_edge_;      // all other inputs, with their indices
  std::vector<at::Tensor> found_;                     // by input: its gradient
  std::unordered_set<ValueId> overwritten_;
  std::vector<NodeId> nodes_;
  std::unordered_set<NodeId> leads_;
  std::unordered_map<ValueId, at::Tensor> gradients_;  // by result: its gradient
};

}  // namespace

std::optional<std::vector<at::Tensor>> derive(at::ArrayRef<at::Tensor> outputs,
                                              at::ArrayRef<at::Tensor> gradients,
                                              at::ArrayRef<at::Tensor> inputs,
                                              const DeriveOptions& options) {
  Scope* scope = capturing_scope();
  if (scope == nullptr || scope->options().max_pending != 0 || CellTrace::current() != nullptr) {
    return std::nullopt;
  }
  const DispatchContext context = DispatchContext::current();
  if (context.autocast() || context.inference_mode) return std::nullopt;
  const Scope::Lock lock(*scope);
  for (const auto& tensors : {outputs, inputs, gradients}) {
    c10::SmallVector<c10::IValue, 8> values(tensors.begin(), tensors.end());
    settle(*scope, values);
  }
  const NoFlushGuard no_flush;
  Derivation derivation(*scope, options);
  try {
    if (!derivation.run(outputs, gradients, inputs)) return std::nullopt;
  } catch (const std::exception& error) {  // autograd then runs and may raise an error
    if (host_interrupts(error)) throw;
    return std::nullopt;
  }
  ++scope->report().gradients;
  return derivation.take();
}

bool depends_on_others(at::ArrayRef<at::Tensor> outputs, at::ArrayRef<at::Tensor> leaves) {
  Scope* scope = capturing_scope();
  if (scope == nullptr) return true;
  const Scope::Lock lock(*scope);
  Graph& graph = scope->graph();
  std::vector<ValueId> roots;
  for (const at::Tensor& output : outputs) {
    const PendingTensor* pending = as_pending(output);
    if (pending == nullptr || pending->graph() != &graph) return true;
    roots.push_back(graph.value_of(output));
  }
  return !nodes_behind(graph.tape(), roots, 0, [&](ValueId id) {
            const at::Tensor& met = graph.tape().graph_inputs[graph.value(id).index].tensor;
            return std::any_of(leaves.begin(), leaves.end(),
                               [&](const at::Tensor& leaf) { return leaf.is_same(met); });
          }).has_value();
}

}  // namespace autobatch

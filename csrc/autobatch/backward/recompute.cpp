#include "autobatch/backward/recompute.h"

#include "autobatch/backward/overwrites.h"
#include "autobatch/backward/saved_tensor_check.h"
#include "autobatch/debug/verify.h"
#include "autobatch/kernels/gather.h"
#include "autobatch/rules/rule.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace autobatch {
namespace {

// Returns the region of `base` that has the geometry `g` and begins `offset` elements from the
// start of `base`.
at::Tensor part_of(const at::Tensor& base, const Geometry& g, int64_t offset) {
  offset += base.storage_offset();
  if (offset == base.storage_offset() && base.sizes() == at::IntArrayRef(g.sizes) &&
      base.strides() == at::IntArrayRef(g.strides)) {
    return base;
  }
  return base.as_strided(g.sizes, g.strides, offset);
}

at::Tensor blank(const Value& value) {
  const Geometry& g = *value.geometry;
  const auto options = value.options();
  if (g.overlapping) return at::zeros(g.sizes, options);
  return at::empty_strided(g.sizes, g.strides, options).zero_();
}

// The ops that run again were captured before the transform, so the transform must not apply to
// them.
constexpr c10::DispatchKeySet kTransformModes({c10::DispatchKey::VmapMode,
                                               c10::DispatchKey::FuncTorchVmapMode,
                                               c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                               c10::DispatchKey::FuncTorchDynamicLayerBackMode});

// Returns a new tensor object with the same history as `tensor`. The alias is created in grad mode,
// because its first reader may be an op that was captured without gradients.
at::Tensor alias_of(const at::Tensor& tensor) {
  const at::AutoGradMode grad_mode(true);
  return tensor.view_as(tensor);
}

}  // namespace

at::Tensor Recompute::take(Gradients& gradients, uint32_t key) {
  const auto found = gradients.find(key);
  return found == gradients.end() ? at::Tensor() : std::exchange(found->second, at::Tensor());
}

void Recompute::add(Gradients& gradients, uint32_t key, const at::Tensor& gradient) {
  at::Tensor& sum = gradients[key];
  sum = sum.defined() ? sum + gradient : gradient;
}

void Recompute::add_root(ValueId held, const at::Tensor& gradient, const Edges& edges) {
  roots_.push_back({held, gradient});
  edges_.graph_inputs.insert(edges.graph_inputs.begin(), edges.graph_inputs.end());
  edges_.cuts.insert(edges.cuts.begin(), edges.cuts.end());
}

bool Recompute::differentiate() {
  if (roots_.empty()) return false;
  forget_constants();
  const bool create_graph = c10::GradMode::is_enabled();
  std::vector<at::Tensor> roots, gradients;
  {
    const at::AutoGradMode grad_mode(true);
    const c10::impl::ExcludeDispatchKeyGuard no_transform(kTransformModes);
    for (const Root& root : std::exchange(roots_, {})) {
      const ValueId parent = record_.tape.values[root.held].parent;
      const at::Tensor tensor = read(root.held, parent == kNone ? kNone : record_.cut(parent));
      if (!tensor.requires_grad()) continue;
      roots.push_back(tensor);
      gradients.push_back(root.gradient.expand_as(tensor));
    }
  }
  std::vector<at::Tensor> inputs;
  std::vector<std::pair<Gradients*, uint32_t>> targets;
  for (const auto& [index, tensor] : graph_input_) {
    if (!tensor.requires_grad()) continue;
    inputs.push_back(tensor);
    targets.emplace_back(&graph_input_grads_, index);
  }
  for (const auto& [id, tensor] : cuts_) {
    if (!tensor.requires_grad()) continue;
    inputs.push_back(tensor);
    targets.emplace_back(&cut_grads_, id);
  }
  if (inputs.empty() || roots.empty()) return true;
  const auto grads = torch::autograd::grad(roots, inputs, gradients, /*retain_graph=*/true,
                                           create_graph, /*allow_unused=*/true);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) add(*targets[i].first, targets[i].second, grads[i]);
  }
  return true;
}

// If a value that was read as a constant gets a gradient, drops all recomputed tensors. The tensors
// are then computed again.
void Recompute::forget_constants() {
  const auto among = [](const auto& ids, const auto& edges) {
    return std::any_of(ids.begin(), ids.end(), [&](auto id) { return edges.count(id) != 0; });
  };
  if (!among(constant_graph_input_, edges_.graph_inputs) && !among(constant_cuts_, edges_.cuts))
    return;
  graph_input_.clear();
  cuts_.clear();
  results_.clear();
  constant_graph_input_.clear();
  constant_cuts_.clear();
}

at::Tensor Recompute::read(ValueId id) { return read(id, record_.cut(id)); }

// A value that was detached in the block is detached again, even if its base requires grad.
at::Tensor Recompute::read(ValueId id, ValueId cut) {
  const at::Tensor found = find(id, cut);
  const bool detached = !record_.tape.values[id].requires_grad && found.requires_grad();
  return detached ? found.detach() : found;
}

at::Tensor Recompute::find(ValueId id, ValueId cut) {
  const Value& value = record_.tape.values[id];
  if (id == cut) return held(cut);
  if (cut != kNone) {
    const Value& of = record_.tape.values[cut];
    if (!of.geometry->overlapping) {
      return part_of(held(cut), *value.geometry, value.offset - of.offset);
    }
    const ElementMap map = record_.element_map(id, cut);
    return part_of(held(cut), *map.geometry, map.offset - record_.element_map(cut, cut).offset);
  }
  const Value& base = record_.tape.values[value.base];
  return part_of(base.is_graph_input() ? graph_input(base.index) : result(value.base),
                 *value.geometry, value.offset);
}

at::Tensor Recompute::graph_input(uint32_t index) {
  at::Tensor& alias = graph_input_[index];
  if (alias.defined()) return alias;
  const GraphInput& graph_input = record_.tape.graph_inputs[index];
  const auto edge = edges_.graph_inputs.find(index);
  const bool differentiable = edge != edges_.graph_inputs.end();
  if (!differentiable) constant_graph_input_.push_back(index);
  if (!differentiable && graph_input.data.defined()) return alias = graph_input.data;
  const at::Tensor tensor = graph_input.data.defined()
                                ? detached_alias(graph_input.data)
                                : blank(record_.tape.values[graph_input.value]);
  if (differentiable) torch::autograd::impl::set_gradient_edge(tensor, edge->second);
  return alias = alias_of(tensor);
}

at::Tensor Recompute::held(ValueId id) {
  at::Tensor& alias = cuts_[id];
  if (alias.defined()) return alias;
  const Value& value = record_.tape.values[id];
  const at::Tensor copy = value.geometry->overlapping ? blank_without_overlap(id) : blank(value);
  {
    const at::NoGradGuard no_grad;
    copy.copy_(computed(id));
  }
  const auto edge = edges_.cuts.find(id);
  if (edge == edges_.cuts.end()) {
    constant_cuts_.push_back(id);
    return alias = copy;
  }
  torch::autograd::impl::set_gradient_edge(copy, edge->second);
  return alias = alias_of(copy);
}

// Returns zeros for a value with overlapping elements. The elements of the returned tensor do not
// overlap.
at::Tensor Recompute::blank_without_overlap(ValueId id) {
  const ElementMap map = record_.element_map(id, id);
  const Value& value = record_.tape.values[id];
  const int64_t length = record_.tape.values[map.of].geometry->numel;
  const auto options = value.options();
  return detached_alias(at::zeros({length}, options)
                            .as_strided(map.geometry->sizes, map.geometry->strides, map.offset));
}

at::Tensor Recompute::computed(ValueId id) const {
  if (!record_.has_values(id)) return blank(record_.tape.values[id]);
  return region_view(record_.store.region(record_.tape, id));
}

// Whether the value `id` is available without another computation. A value that requires no
// gradient is a constant if its memory still exists. Such a value is not computed again, because
// its ops may be random.
bool Recompute::is_known(ValueId id) {
  if (results_.count(id) != 0) return true;
  const Value& value = record_.tape.values[id];
  const bool is_constant = !value.requires_grad && record_.has_values(id) &&
                           record_.tape.nodes[value.node].num_values == 1;
  if (is_constant) results_[id] = computed(id).clone();
  return is_constant;
}

at::Tensor Recompute::result(ValueId id) {
  if (!is_known(id)) run(record_.tape.values[id].node);
  return results_.at(id);
}

// restore_last and overwrite_saved write to tensors through an alias, so that version counters do
// not change. These functions repeat a write of the user that did not change the version counters
// either.
void Recompute::Operands::restore_last(const at::Tensor& as_read) {
  tensors.back() = tensors.back().clone();
  const at::NoGradGuard no_grad;
  detached_alias(tensors.back()).copy_(as_read);
}

void Recompute::Operands::overwrite_saved() const {
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, now] : saved) detached_alias(tensor).copy_(now);
}

// Returns the operands of a node. The user may have written to an operand since the op ran. The op
// is computed again from the old content. If the op's formula saved the operand, the operand then
// gets the new content, because eager mode saves the tensor itself and not a copy.
Recompute::Operands Recompute::read_operands(NodeId id) {
  const Tape& tape = record_.tape;
  const Node& node = tape.nodes[id];
  Operands out;
  for (uint32_t slot = 0; slot < node.num_operands; ++slot) {
    const ValueId operand = tape.operands[node.first_operand + slot];
    out.tensors.push_back(operand == kNone ? at::Tensor() : read(operand));
    if (operand == kNone) continue;
    const Value& value = tape.values[operand];
    const Value& base = tape.values[value.base];
    at::Tensor as_read, now;
    if (const UnseenWrite* write = find_unseen_write(unseen_, value.base)) {
      as_read = computed(operand);
      now = part_of(write->now, *value.geometry, value.offset);
    } else if (base.is_graph_input() && record_.cut(operand) == kNone &&
               is_overwritten(tape.graph_inputs[base.index])) {
      const GraphInput& graph_input = tape.graph_inputs[base.index];
      as_read = part_of(graph_input.as_read, *value.geometry, value.offset);
      now = part_of(graph_input.data, *value.geometry, value.offset);
    }
    if (!as_read.defined()) continue;
    out.restore_last(as_read);
    if (saves_operand(tape, node, slot)) out.saved.emplace_back(out.tensors.back(), now);
  }
  return out;
}

void Recompute::overwrite_saved_results(NodeId id, const std::vector<at::Tensor>& results) const {
  const Tape& tape = record_.tape;
  const Node& node = tape.nodes[id];
  const at::NoGradGuard no_grad;
  for (uint32_t k = 0; k < results.size() && k < node.num_values; ++k) {
    const UnseenWrite* write = find_unseen_write(unseen_, node.first_value + k);
    if (write == nullptr || !results[k].defined() || !saves_result(tape, node, k)) continue;
    const Value& value = tape.values[node.first_value + k];
    detached_alias(results[k]).copy_(part_of(write->now, *value.geometry, value.offset));
  }
}

void Recompute::check_recomputed(NodeId id, const std::vector<at::Tensor>& results) const {
  const Tape& tape = record_.tape;
  const Node& node = tape.nodes[id];
  if (node.signature->op->random) return;
  for (uint32_t k = 0; k < results.size() && k < node.num_values; ++k) {
    const ValueId value = node.first_value + k;
    if (!results[k].defined() || !record_.has_values(value)) continue;
    autobatch::check_recomputed(results[k].detach(), computed(value), *node.signature);
  }
}

// Computes the node `last`, after the nodes that it depends on. Graphs may be deep, and recursion
// could overflow the thread's stack. So this function uses an explicit stack.
void Recompute::run(NodeId last) {
  const Tape& tape = record_.tape;
  std::vector<NodeId> stack{last};
  while (!stack.empty()) {
    const NodeId id = stack.back();
    const Node& node = tape.nodes[id];
    if (results_.count(node.first_value) != 0) {
      stack.pop_back();
      continue;
    }
    const size_t depth = stack.size();
    for (ValueId operand : tape.operands_of(node)) {
      if (operand == kNone || record_.cut(operand) != kNone) continue;
      const Value& base = tape.values[tape.values[operand].base];
      if (!base.is_graph_input() && !is_known(tape.values[operand].base)) {
        stack.push_back(base.node);
      }
    }
    if (stack.size() > depth) continue;
    stack.pop_back();
    is_replayed_.resize(tape.nodes.size(), 0);
    const bool again = std::exchange(is_replayed_[id], 1) != 0;
    if (!again) check_computable(record_, id);
    const Signature& signature = *node.signature;
    const ContextGuard context(signature.context);
    const at::AutoGradMode grad_mode(signature.context.grad_mode);
    Operands operands = read_operands(id);
    std::vector<at::Tensor> hidden;
    for (uint32_t k = 0; k < node.num_values; ++k) {
      hidden.push_back(computed(node.first_value + k));
    }
    const std::vector<at::Tensor> results =
        signature.rule->replay(signature, operands.tensors, hidden);
    operands.overwrite_saved();
    if (record_.verified) check_recomputed(id, results);
    if (!unseen_.empty()) overwrite_saved_results(id, results);
    for (uint32_t k = 0; k < results.size() && k < node.num_values; ++k) {
      results_[node.first_value + k] = results[k];
    }
    if (record_.divided(id)) {
      const Rule::ResultDependency dependency = signature.rule->result_dependency();
      results_[node.first_value + dependency.result] =
          signature.rule->replay_chain(operands.tensors, held(node.first_value + dependency.from));
    }
    if (!again) replayed_.push_back(id);
  }
}

}  // namespace autobatch

#include "autobatch/capture/known_values.h"

#include "autobatch/backward/backward.h"
#include "autobatch/capture/capture.h"
#include "autobatch/capture/deferred_writes.h"
#include "autobatch/capture/record_call.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/plain_state.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/rule.h"
#include "autobatch/scope/scope.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/nonzero.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace autobatch {
namespace {

using at::Tensor;
using torch::jit::Stack;

// A value is computed without a flush only within two limits: the number of ops, and the number of
// elements of a result. Masks, lengths and indices are usually within the limits, but most values
// of a model are not.
constexpr size_t kMostOps = 64;
constexpr int64_t kMostElements = 1 << 16;
// The maximum number of elements of an operand that the members of a batch share. A shared operand
// may be a weight of a model.
constexpr int64_t kMostOfWeight = 256;

class Evaluation {
 public:
  // Makes an evaluation that runs at most `most_ops` ops.
  explicit Evaluation(Scope& scope, size_t most_ops)
      : graph_(scope.graph()), known_(scope.known_values()), most_ops_(most_ops) {
    if (known_.numbering == graph_.numbering()) return;
    known_.values.clear();
    known_.numbering = graph_.numbering();
  }

  // Returns the value `id`, and computes it if needed. Returns an undefined tensor if the value is
  // not known.
  Tensor value_of(ValueId id) {
    const Value& value = graph_.value(id);
    const Tensor base =
        value.is_graph_input() ? graph_.tape().graph_inputs[value.index].data : result(value.base);
    if (!base.defined()) return {};
    return strided_view(base, value.geometry->sizes, value.geometry->strides, value.offset);
  }

 private:
  Tensor result(ValueId id) {
    const NodeId node = graph_.value(id).node;
    if (graph_.is_computed(node)) {
      return region_view(graph_.open_record()->store.region(graph_.tape(), id));
    }
    const auto found = known_.values.find(id);
    if (found != known_.values.end()) return found->second;
    if (most_ops_ == 0) return {};
    if (!run(graph_.tape().nodes[node])) known_.values[id] = Tensor();
    return known_.values[id];
  }

  // Whether the node is probably an op on data (masks, indices) or only on parameters, and not an
  // op of a model.
  bool is_worth_it(const Node& node) const {
    const Signature& signature = *node.signature;
    if (signature.op->random || signature.rule->subgraph() != nullptr) return false;
    for (uint32_t k = 0; k < node.num_values; ++k) {
      const Value& value = graph_.value(node.first_value + k);
      if (value.requires_grad || value.geometry->numel > kMostElements) return false;
    }
    const auto operands = graph_.tape().operands_of(node);
    size_t num_given = 0, num_parameters = 0;
    for (size_t slot = 0; slot < operands.size(); ++slot) {
      if (operands[slot] == kNone) continue;
      const Value& operand = graph_.value(operands[slot]);
      ++num_given;
      if (operand.requires_grad) ++num_parameters;
      const bool shared = slot < 64 && (signature.weight_slots >> slot & 1) != 0;
      const int64_t most = shared || signature.rule->heavy() ? kMostOfWeight : kMostElements;
      if (operand.geometry->numel > most) return false;
    }
    const bool of_parameters = num_parameters == num_given && !signature.rule->heavy();
    return num_parameters == 0 || of_parameters;
  }

  // Runs the node and stores its results in known_. Returns false if the results cannot be computed
  // now.
  bool run(const Node& node) {
    if (++num_ops_ > most_ops_ || !is_worth_it(node)) return false;
    std::vector<Tensor> operands, places;
    for (const ValueId operand : graph_.tape().operands_of(node)) {
      operands.push_back(operand == kNone ? Tensor() : value_of(operand));
      if (operand != kNone && !operands.back().defined()) return false;
    }
    for (uint32_t k = 0; k < node.num_values; ++k) {
      const Value& value = graph_.value(node.first_value + k);
      const Geometry& g = *value.geometry;
      places.push_back(at::empty_strided(g.sizes, g.strides, value.options()));
    }
    const ContextGuard context(node.signature->context);
    try {
      const auto results = node.signature->rule->eager(*node.signature, operands, places);
      for (uint32_t k = 0; k < results.size() && k < node.num_values; ++k) {
        known_.values[node.first_value + k] = places[k].copy_(results[k]);
      }
    } catch (const c10::Error&) {
      return false;  // the flush will raise the error
    }
    return true;
  }

  Graph& graph_;
  KnownValues& known_;
  const size_t most_ops_;
  size_t num_ops_ = 0;
};

// --- indices ---

bool is_mask(const Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// Appends the positions of the mask's true elements to `out`, one tensor per dimension. `first` is
// the dimension of `of` that the mask's first dimension indexes. Returns false if the sizes of the
// mask differ from the sizes of the dimensions that it indexes.
bool expand_mask(const Tensor& mask, const Tensor& of, int64_t first,
                 c10::List<std::optional<Tensor>>& out) {
  if (mask.dim() == 0 || first + mask.dim() > of.dim()) return false;
  for (int64_t d = 0; d < mask.dim(); ++d) {
    if (mask.size(d) != of.size(first + d)) return false;
  }
  if (mask.scalar_type() == at::kByte) {
    TORCH_WARN(
        "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool "
        "instead.");
  }
  const Tensor positions = at::nonzero(mask).t().contiguous();
  for (int64_t d = 0; d < mask.dim(); ++d) out.push_back(positions.select(0, d));
  return true;
}

bool in_range(const Tensor& index, int64_t size) {
  // Reading from another device would wait for that device.
  if (!has_host_memory(index.device()) || index.numel() == 0) return true;
  // The usual case has a faster check, which takes a tenth of the time of aminmax.
  if (index.scalar_type() == at::kLong && index.dim() == 1) {
    const int64_t* at = index.const_data_ptr<int64_t>();
    const int64_t step = index.stride(0);
    bool inside = true;
    for (int64_t i = 0; i < index.numel(); ++i) {
      const int64_t value = at[i * step];
      inside &= value >= -size && value < size;
    }
    return inside;
  }
  const auto [least, most] = index.aminmax();
  return least.item<int64_t>() >= -size && most.item<int64_t>() < size;
}

Tensor known_value(Scope& scope, const Tensor& tensor, size_t most_ops) {
  const PendingTensor* pending = as_pending(tensor);
  if (pending == nullptr) return tensor;
  Graph& graph = scope.graph();
  if (pending->graph() != &graph) return {};
  if (graph.requires_grad_now(pending->value())) return {};
  settle(scope, {c10::IValue(tensor)});
  const PlainStateGuard plain;
  return Evaluation(scope, most_ops).value_of(graph.current(pending->value()));
}

}  // namespace

Tensor known_value(Scope& scope, const Tensor& tensor) {
  return known_value(scope, tensor, kMostOps);
}

bool is_known(const Tensor& tensor) {
  const PendingTensor* pending = as_pending(tensor);
  if (pending == nullptr) return true;
  Scope* scope = Scope::current();
  if (scope == nullptr) return false;
  const Scope::Lock lock(*scope);
  return known_value(*scope, tensor).defined();
}

bool put_known_values(Scope& scope, const OpInfo& op, Stack* stack) {
  if (!op.name.starts_with("aten::")) return false;
  for (const c10::Argument& argument : op.handle.schema().arguments()) {
    if (argument.alias_info() != nullptr) return false;
  }
  bool known = true;
  const bool is_inference_mode = c10::InferenceMode::is_enabled();
  const auto value = [&](const Tensor& tensor) {
    // Autograd cannot save an inference tensor, but the values that are computed here are ordinary
    // tensors.
    known = known && (is_inference_mode || !tensor.is_inference());
    const Tensor found = known ? known_value(scope, tensor) : Tensor();
    known = known && found.defined();
    return found;
  };
  std::vector<c10::IValue> values;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.num_arguments)) {
    if (!known) return false;
    if (argument.isTensor() && argument.toTensor().defined()) {
      values.emplace_back(value(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : argument.toTensorVector()) list.push_back(value(tensor));
      values.emplace_back(list);
    } else {
      values.push_back(argument);
      for_each_tensor(argument,
                      [&](const Tensor& t) { known = known && as_pending(t) == nullptr; });
    }
  }
  if (!known) return false;
  torch::jit::drop(*stack, op.num_arguments);
  for (c10::IValue& argument : values) stack->push_back(std::move(argument));
  return true;
}

bool prepare_indices(Scope& scope, const OpInfo& op, Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, op.num_arguments).toTensor();
  c10::IValue& argument = torch::jit::peek(*stack, op.index_argument, op.num_arguments);
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  c10::List<std::optional<Tensor>> indices;
  bool masks = false;
  for (const c10::IValue& item : argument.toListRef()) {
    const auto first = static_cast<int64_t>(indices.size());
    if (item.isNone() || !item.toTensor().defined()) {
      indices.push_back(std::nullopt);
      continue;
    }
    const Tensor& index = item.toTensor();
    // The flush checks the range of an index. So no op runs here only to check the range.
    const Tensor known = known_value(scope, index, is_mask(index) ? kMostOps : 0);
    if (is_mask(index)) {
      // The result's shape is not known, so the op is handled like any op that needs values.
      if (!known.defined()) return true;
      if (!expand_mask(known, self, first, indices)) return false;
      masks = true;
    } else {
      if (first >= self.dim()) return false;
      if (known.defined() && !in_range(known, self.size(first))) return false;
      indices.push_back(index);
    }
  }
  if (!masks) return true;
  if (op.name.starts_with("aten::index_put")) {
    // If the value has one element, eager calls `masked_fill_`, which converts the dtype.
    const Tensor& value = torch::jit::peek(*stack, 2, op.num_arguments).toTensor();
    if (value.numel() == 1 && value.scalar_type() != self.scalar_type()) return false;
  }
  CellTrace::break_off("the selected elements depend on tensor values", op.name);
  argument = c10::IValue(std::move(indices));
  return true;
}

}  // namespace autobatch

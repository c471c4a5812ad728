#include "autobatch/debug/verify.h"

#include "autobatch/common/compat.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/local_autograd.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace autobatch {
namespace {

// Returns the largest difference that is accepted as rounding for this dtype. The difference is
// relative to the largest magnitude of the result.
double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kComplexDouble:
      return 1e-9;
    case at::kHalf:
    case at::kBFloat16:
      return 3e-2;
    default:
      return 1e-4;
  }
}

// Returns the largest difference between corresponding elements, divided by the largest expected
// magnitude (or by 1 if that is larger).
double difference(const at::Tensor& value, const at::Tensor& expected) {
  if (value.numel() == 0) return 0;
  if (!value.is_floating_point() && !value.is_complex()) return value.equal(expected) ? 0 : 1;
  const at::Tensor same =
      value.eq(expected).logical_or(value.isnan().logical_and(expected.isnan()));
  const at::Tensor apart = (value - expected).abs().masked_fill(same, 0);
  const at::Tensor finite = expected.abs().masked_fill(expected.isfinite().logical_not(), 0);
  return apart.max().item<double>() / std::max(1.0, finite.max().item<double>());
}

}  // namespace

void Verifier::note(Graph& graph, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                    at::ArrayRef<ValueId> results) {
  if (op.random) return;
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::AutoGradMode no_grad(false);
  bool known = true;
  double rounding = 0;  // tolerance of the arguments (a float64 sum of float32 values is not exact)
  const auto eager = [&](const at::Tensor& tensor) {
    const PendingTensor* pending = as_pending(tensor);
    if (pending == nullptr) return tensor;
    const ValueId id = graph.current(pending->value());  // may reallocate the values
    const Value& value = graph.value(id);
    if (const auto found = expected_.find(id); found != expected_.end()) {
      rounding = std::max(rounding, found->second.tolerance);
      return found->second.tensor;
    }
    // The eager run has no value for this view, because the viewed tensor was written to. So the
    // view is made from the eager value of the base.
    const auto base = expected_.find(value.base);
    known =
        known && base != expected_.end() &&
        base->second.tensor.strides() == at::IntArrayRef(graph.value(value.base).geometry->strides);
    if (!known) return tensor;
    rounding = std::max(rounding, base->second.tolerance);
    const Geometry& g = *value.geometry;
    return base->second.tensor.as_strided(g.sizes, g.strides, value.offset);
  };
  torch::jit::Stack stack;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      stack.emplace_back(eager(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : argument.toTensorVector()) list.push_back(eager(tensor));
      stack.emplace_back(list);
    } else if (argument.isList() && !argument.toListRef().empty() &&
               argument.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& item : argument.toListRef()) {
        list.push_back(item.isTensor() ? std::optional(eager(item.toTensor())) : std::nullopt);
      }
      stack.emplace_back(list);
    } else {
      stack.push_back(argument);
    }
  }
  if (!known) return;
  op.handle.callBoxed(stack);
  const std::vector<at::Tensor> tensors = results_of(stack);
  for (size_t i = 0; i < results.size() && i < tensors.size(); ++i) {
    const double own = tensors[i].defined() ? tolerance(tensors[i].scalar_type()) : 0;
    expected_[results[i]] = {tensors[i], current_site(), std::max(own, rounding)};
  }
}

// Whether the op returns uninitialized memory.
static bool is_uninitialized(const OpInfo& op) {
  return op.name.starts_with("aten::empty") || op.name.starts_with("aten::new_empty");
}

void Verifier::check(const FlushRecord& record) const {
  std::vector<const BatchRecord*> batch_of(record.tape.nodes.size(), nullptr);
  for (const BatchRecord& batch : record.batches) {
    for (uint32_t i = 0; i < batch.count; ++i) batch_of[record.order[batch.first + i]] = &batch;
  }
  for (ValueId id = 0; id < record.tape.values.size(); ++id) {
    const Value& value = record.tape.values[id];
    const auto found = expected_.find(id);
    if (found == expected_.end() || value.is_graph_input() || batch_of[value.node] == nullptr)
      continue;
    const BatchRecord& batch = *batch_of[value.node];
    if (is_uninitialized(*batch.signature->op)) continue;
    const at::Tensor got = region_view(record.store.region(record.tape, id));
    const double apart = difference(got, found->second.tensor);
    TORCH_CHECK(apart <= found->second.tolerance,
                "torch_autobatch: verify: ", batch.signature->op->name, " captured at ",
                found->second.site, " differs from eager mode by ", apart,
                " (relative), in a result of shape ", found->second.tensor.sizes(), ". The ",
                batch.rule->report_name(), " rule ran the op in a batch of ", batch.count,
                ". Please report this.");
  }
}

void check_recomputed(const at::Tensor& again, const at::Tensor& before,
                      const Signature& signature) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::AutoGradMode no_grad(false);
  const double apart = difference(again, before);
  TORCH_CHECK(apart <= tolerance(before.scalar_type()),
              "torch_autobatch: verify: ", signature.op->name, " captured at ", signature.site,
              ", computed again for create_graph=True, differs from the block's result by ", apart,
              " (relative), in a result of shape ", before.sizes(),
              ". An operand was modified without a change of its version counter: through NumPy, a "
              "storage, or set_().");
}

}  // namespace autobatch

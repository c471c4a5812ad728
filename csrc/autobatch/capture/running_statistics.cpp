#include "autobatch/capture/running_statistics.h"

#include "autobatch/capture/memory_order.h"
#include "autobatch/capture/memory_updates.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/var.h>
#include <ATen/ops/var_mean.h>
#include <c10/core/InferenceMode.h>

#include <tuple>

namespace autobatch {
namespace {

using at::Tensor;

// Whether the argument is an ordinary buffer for a statistic of `x`. No pending op may read the
// buffer, unless the buffer already waits for updates.
bool is_statistic(Scope& scope, const c10::IValue& argument, const Tensor& x) {
  if (!argument.isTensor() || !argument.toTensor().defined()) return false;
  const Tensor& buffer = argument.toTensor();
  if (as_pending(buffer) != nullptr || !is_plain(*buffer.unsafeGetTensorImpl())) return false;
  if (buffer.requires_grad() || !buffer.is_floating_point()) return false;
  if (buffer.is_inference() != c10::InferenceMode::is_enabled()) return false;
  if (buffer.dim() != 1 || buffer.numel() != x.size(1) || buffer.device() != x.device()) {
    return false;
  }
  Graph& graph = scope.graph();
  const bool waits_for_updates = graph.is_stale(buffer) && !is_ordered(scope, buffer.storage());
  return waits_for_updates || !graph.reads_storage_of(buffer);
}

// Returns the variance and the mean of each channel of x [N, C, ...]. If only one dimension has to
// be reduced, `var` and `mean` are called separately, because both ops have native rules for any
// length.
std::tuple<Tensor, Tensor> statistics(Tensor x) {
  const c10::Scalar correction(1);
  if (x.dim() == 2) return {at::var(x, {0}, correction), at::mean(x, {0})};
  if (x.size(0) == 1) {
    x = x.squeeze(0).flatten(1);
    return {at::var(x, {1}, correction), at::mean(x, {1})};
  }
  at::DimVector dims{0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return at::var_mean(x, dims, correction);
}

// Defers the update target = (1 - momentum) * target + momentum * source. Eager's kernel of
// batch_norm does not increase the version counter of the target.
void add_momentum_update(Scope& scope, const Tensor& target, const Tensor& source,
                         double momentum) {
  static const c10::OperatorHandle mul = find_op("aten::mul_", "Scalar").handle;
  static const c10::OperatorHandle add = find_op("aten::add_", "Tensor").handle;
  add_update(scope, mul, {target, 1 - momentum});
  add_update(scope, add, {target, source, momentum});
}

}  // namespace

bool record_batch_norm(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                       Tensor& result) {
  if (!arguments[0].isTensor()) return false;
  const Tensor x = arguments[0].toTensor();
  // instance_norm has the same arguments as batch_norm. If the batch dimension has size 1,
  // instance_norm also returns the same result.
  const bool is_instance_norm = op.name == "aten::instance_norm" && x.dim() > 2 && x.size(0) == 1;
  if (op.name != "aten::batch_norm" && !is_instance_norm) return false;
  if (x.dim() < 2 || x.numel() <= x.size(1) || !x.is_floating_point()) return false;
  for (const size_t i : {3, 4}) {
    if (!is_statistic(scope, arguments[i], x)) return false;
  }
  const Tensor mean = arguments[3].toTensor(), variance = arguments[4].toTensor();
  if (mean.is_alias_of(variance)) return false;
  const double momentum = arguments[6].toDouble();
  const auto optional = [&](size_t i) { return arguments[i].toOptional<Tensor>(); };
  result = at::batch_norm(x, optional(1), optional(2), {}, {}, /*training=*/true, momentum,
                          arguments[7].toDouble(), arguments[8].toBool());
  Tensor data = x.detach();
  if (data.scalar_type() != mean.scalar_type()) data = data.to(mean.scalar_type());
  const auto [var_of_x, mean_of_x] = statistics(data);
  add_momentum_update(scope, mean, mean_of_x, momentum);
  add_momentum_update(scope, variance, var_of_x, momentum);
  return true;
}

}  // namespace autobatch

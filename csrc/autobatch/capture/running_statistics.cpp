#include "autobatch/capture/running_statistics.h"

#include "autobatch/capture/record_call.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/var.h>
#include <ATen/ops/var_mean.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <tuple>

namespace autobatch {
namespace {

using at::Tensor;

// Whether the argument is an ordinary buffer for a statistic of `x` that no pending op reads.
bool is_statistic(const Graph& graph, const c10::IValue& argument, const Tensor& x) {
  if (!argument.isTensor() || !argument.toTensor().defined()) return false;
  const Tensor& buffer = argument.toTensor();
  if (as_pending(buffer) != nullptr || !is_plain(*buffer.unsafeGetTensorImpl())) return false;
  if (buffer.requires_grad() || !buffer.is_floating_point()) return false;
  if (buffer.is_inference() != c10::InferenceMode::is_enabled()) return false;
  if (buffer.dim() != 1 || buffer.numel() != x.size(1) || buffer.device() != x.device()) {
    return false;
  }
  return graph.is_stale(buffer) || !graph.reads_storage_of(buffer);
}

bool is_stale(const Graph& graph, const Tensor& tensor) {
  return as_pending(tensor) == nullptr && tensor.layout() == c10::kStrided && !tensor.is_meta() &&
         graph.is_stale(tensor);
}

// Returns the variance and the mean of each channel of x [N, C, ...]. If one dimension is left to
// reduce, `var` and `mean` are called separately, because both have native rules for any length.
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

void finish(Scope& scope, const std::string& reason) {
  c10::SmallVector<PendingTensor*, 8> waiting;
  for (const StatisticsUpdate& update : scope.updates()) {
    if (PendingTensor* pending = as_pending(update.source)) waiting.push_back(pending);
  }
  if (!waiting.empty()) scope.compute(waiting, reason);
  apply_updates(scope);
}

}  // namespace

bool record_batch_norm(Scope& scope, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                       Tensor& result) {
  if (!arguments[0].isTensor()) return false;
  Graph& graph = scope.graph();
  const Tensor x = arguments[0].toTensor();
  // instance_norm has the same arguments. For one example, it computes the same as batch_norm.
  const bool is_instance_norm = op.name == "aten::instance_norm" && x.dim() > 2 && x.size(0) == 1;
  if (op.name != "aten::batch_norm" && !is_instance_norm) return false;
  if (x.dim() < 2 || x.numel() <= x.size(1) || !x.is_floating_point()) return false;
  for (const size_t i : {3, 4}) {
    if (!is_statistic(graph, arguments[i], x)) return false;
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
  scope.updates().push_back({mean, mean_of_x, momentum});
  scope.updates().push_back({variance, var_of_x, momentum});
  graph.note_stale(mean);
  graph.note_stale(variance);
  return true;
}

void apply_updates(Scope& scope) {
  auto& updates = scope.updates();
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  // Eager's batch_norm kernel does not increase the version counters either.
  const at::AutoDispatchBelowADInplaceOrView unseen;
  while (!updates.empty()) {
    const auto* pending = as_pending(updates.front().source);
    if (pending != nullptr && !pending->is_lost()) return;
    if (pending != nullptr) break;  // the value was lost: drop all updates
    StatisticsUpdate& update = updates.front();
    update.target.mul_(1 - update.momentum).add_(update.source, update.momentum);
    updates.pop_front();
  }
  updates.clear();
  scope.graph().forget_stale();
}

void finish_updates(Scope& scope, const std::string& op, at::ArrayRef<c10::IValue> arguments) {
  bool stale = false;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(
        argument, [&](const Tensor& tensor) { stale = stale || is_stale(scope.graph(), tensor); });
  }
  if (stale) finish(scope, op + ": needs running statistics");
}

void finish_updates(const Tensor& tensor, const char* read) {
  Scope* scope = Scope::current();
  if (scope == nullptr || !scope->graph().has_stale() || !is_stale(scope->graph(), tensor)) return;
  finish(*scope, std::string(read) + " of running statistics");
}

}  // namespace autobatch

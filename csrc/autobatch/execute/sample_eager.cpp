#include "autobatch/execute/sample_eager.h"

#include "autobatch/common/compat.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"
#include "autobatch/rules/generic.h"

namespace autobatch {
namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = EagerEstimate::Nanoseconds;

constexpr Nanoseconds kSmallOp(4000), kManyOps(50000);
constexpr Nanoseconds kMostSampling(5'000'000);

// Whether the op may run twice. A second run of a random op would draw other numbers, and code of
// the user must run only once.
bool is_repeatable(const Signature& signature) {
  return !signature.op->random && !is_custom_function(*signature.op) &&
         signature.op->name.starts_with("aten::");
}

// Times the second of two calls. The second call finds its code and data in the caches, so its time
// is a lower bound of the time in real use.
Nanoseconds time_alone(BatchView& batch, int64_t m) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const bool needs_grad = batch.record().needs_grad;
  try {
    call_single(batch, m, needs_grad);
    const auto began = Clock::now();
    call_single(batch, m, needs_grad);
    return Clock::now() - began;
  } catch (const std::exception& error) {  // the batch raises the error again
    if (host_interrupts(error)) throw;
    return kSmallOp;
  }
}

Nanoseconds time_of_member(EagerEstimate& estimate, BatchView& batch) {
  const Signature& signature = batch.signature();
  if (signature.own_rule != nullptr) return kManyOps;  // the node contains the ops of a cell
  if (!is_repeatable(signature)) return kSmallOp;
  const auto known = estimate.ops.find(signature.serial);
  if (known != estimate.ops.end()) return known->second;
  if (estimate.sampling > kMostSampling) return kSmallOp;
  return estimate.ops[signature.serial] = time_alone(batch, batch.size() / 2);
}

}  // namespace

void add_batch(EagerEstimate& estimate, BatchView& batch) {
  const auto began = Clock::now();
  const Nanoseconds each = time_of_member(estimate, batch);
  estimate.eager += each * batch.size();
  estimate.sampling += Clock::now() - began;
}

}  // namespace autobatch

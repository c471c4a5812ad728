#include "autobatch/plan/deferred_checks.h"

#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/graph/pending_tensor.h"

#include <ATen/ops/is_nonzero.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace autobatch {
namespace {

bool truth_of(const Region& region) {
  const at::Tensor& buffer = *region.buffer;
  if (has_host_memory(buffer.device()) && buffer.scalar_type() == at::kBool) {
    return static_cast<const bool*>(buffer.const_data_ptr())[region.offset];
  }
  return at::is_nonzero(buffer.as_strided({}, {}, buffer.storage_offset() + region.offset));
}

}  // namespace

bool DeferredChecks::any_waiting(Owner owner) const {
  return std::ranges::any_of(all_, [owner](const Item& item) {
    return item.owner == owner && item.state == State::kWaits;
  });
}

std::vector<PendingTensor*> DeferredChecks::asked() const {
  std::vector<PendingTensor*> tensors;
  for (const Item& item : all_) {
    PendingTensor* tensor = item.state == State::kWaits ? as_pending(item.asked) : nullptr;
    if (tensor != nullptr && tensor->is_pending()) tensors.push_back(tensor);
  }
  return tensors;
}

void DeferredChecks::settle(Item& item, const Find& find, const CauseOf& cause_of) {
  const PendingTensor* pending = as_pending(item.asked);
  std::optional<bool> truth;
  if (pending == nullptr) {
    truth = at::is_nonzero(item.asked);
  } else if (pending->is_lost()) {
    item.lost = cause_of(*pending);
    item.state = State::kFailed;
  } else if (const std::optional<Region> region = find(*pending)) {
    truth = truth_of(*region);
  }
  if (truth.has_value()) item.state = *truth == item.expected ? State::kHolds : State::kFailed;
}

bool DeferredChecks::settle(const Find& find, const CauseOf& cause_of) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  for (Item& item : all_) {
    if (item.state == State::kWaits) settle(item, find, cause_of);
  }
  const auto held = std::ranges::stable_partition(
      all_, [](const Item& item) { return item.state != State::kHolds; });
  const bool any = !held.empty();
  all_.erase(held.begin(), held.end());
  waiting_ = static_cast<size_t>(std::ranges::count(all_, State::kWaits, &Item::state));
  return any;
}

std::exception_ptr DeferredChecks::failure_of(Owner owner) {
  const auto failed = std::ranges::find_if(all_, [owner](const Item& item) {
    return item.owner == owner && item.state == State::kFailed;
  });
  if (failed == all_.end()) return nullptr;
  return failed->lost ? failed->lost : failed->check->failure();
}

bool DeferredChecks::has_failed(Owner owner) const {
  return std::ranges::any_of(all_, [owner](const Item& item) {
    return item.owner == owner && item.state == State::kFailed;
  });
}

void DeferredChecks::drop(Owner owner) {
  std::erase_if(all_, [owner](const Item& item) { return item.owner == owner; });
  waiting_ = static_cast<size_t>(std::ranges::count(all_, State::kWaits, &Item::state));
}

void DeferredChecks::clear() {
  all_.clear();
  waiting_ = 0;
  which_ = Which::kNone;
  host_.reset();
}

}  // namespace autobatch

#include "autobatch/subgraph/factor_buffers.h"

#include "autobatch/common/pool.h"

#include <ATen/ops/empty.h>

namespace autobatch {

at::Tensor FactorBuffers::take(const void* flush, bool backward, uint32_t number,
                               const RowRange& range, int64_t width,
                               const at::TensorOptions& options) {
  const int64_t end = range.before + range.count;
  const bool first = backward ? end == range.total : range.before == 0;
  const bool last = backward ? range.before == 0 : end == range.total;
  if (first && last) return pooled_empty(range.count * width, options);
  const std::lock_guard lock(mutex_);
  const Key key{flush, backward, number};
  c10::Storage storage;
  if (first) {
    forget_lost();
    storage = pooled_empty(range.total * width, options).storage();
    taken_.insert_or_assign(key, Taken{storage.getWeakStorageImpl(), 0, range.total});
  } else {
    const auto known = taken_.find(key);
    if (known == taken_.end()) return pooled_empty(range.count * width, options);
    const auto held = known->second.storage.lock();
    const bool adjoins = known->second.edge == (backward ? end : range.before);
    if (!held || !adjoins || known->second.total != range.total) {
      return pooled_empty(range.count * width, options);
    }
    storage = c10::Storage(held);
  }
  taken_.at(key).edge = backward ? range.before : end;
  if (last) taken_.erase(key);
  return at::empty({0}, options).set_(storage, range.before * width, {range.count * width}, {1});
}

// Removes the entries whose memory has been freed. Such entries remain after a failed flush.
void FactorBuffers::forget_lost() {
  std::erase_if(taken_, [](const auto& entry) { return entry.second.storage.expired(); });
}

}  // namespace autobatch

#include "autobatch/kernels/packed_weights.h"

#include "autobatch/graph/graph.h"
#include "autobatch/graph/storage_aliases.h"

#include <algorithm>

namespace autobatch {
namespace {

// If the kept copies take more bytes than this, they are dropped, and made again when they are
// needed.
constexpr size_t kMostKept = size_t{1} << 26;

}  // namespace

bool WeightCopies::keep(const GraphInput& weight, size_t num_views) {
  if (!weight.counted || weight.is_copy) return false;
  const void* address = weight.data.const_data_ptr();
  if (sources_.contains(address)) return true;
  const size_t expected = num_views + 2;  // plus the weight itself and GraphInput::data
  if (weight.data.storage().use_count() > expected || may_change_unseen(weight.data)) return false;
  sources_[address] = {weight.data, weight.counter, weight.counter.current_version()};
  return true;
}

void WeightCopies::drop_changed() {
  const bool changed = std::ranges::any_of(sources_, [](const auto& entry) {
    const Source& source = entry.second;
    return source.counter.current_version() != source.version || may_change_unseen(source.data);
  });
  if (changed || bytes_ > kMostKept) clear();
}

void WeightCopies::forget(const at::Tensor& written) {
  if (sources_.empty() || !written.has_storage()) return;
  const c10::StorageImpl* storage = written.storage().unsafeGetStorageImpl();
  const bool any = std::ranges::any_of(sources_, [&](const auto& entry) {
    return entry.second.data.storage().unsafeGetStorageImpl() == storage;
  });
  if (any) clear();
}

void WeightCopies::clear() {
  joined_.clear();
  turned_.clear();
  sources_.clear();
  bytes_ = 0;
}

}  // namespace autobatch

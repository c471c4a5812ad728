#include "autobatch/graph/storage_aliases.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/common/plain_state.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/held_memory.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace autobatch {
namespace {

// Storages whose tensors have several version counters.
StorageSet& shared_storages() {
  static auto* storages = new StorageSet();
  return *storages;
}

}  // namespace

void StorageSet::add(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (storages_.size() >= sweep_at_) sweep();
  storages_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
  any_.store(true, std::memory_order_relaxed);
}

bool StorageSet::has(const c10::Storage& storage) {
  if (!any()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return storages_.count(storage.unsafeGetStorageImpl()) != 0;
}

void StorageSet::sweep() {
  std::erase_if(storages_, [](const auto& entry) { return entry.second.expired(); });
  sweep_at_ = std::max<size_t>(64, 2 * storages_.size());
}

void note_alias(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta()) return;
  shared_storages().add(tensor.storage());
  HeldMemories::keep(tensor.storage());
}

bool any_aliases() { return shared_storages().any(); }

bool has_aliases(const c10::Storage& storage) { return shared_storages().has(storage); }

bool may_change_unseen(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().use_count() > 1 &&
         shared_storages().has(tensor.storage());
}

at::Tensor copy_as_read(const at::Tensor& tensor) {
  const PlainStateGuard plain;
  int64_t extent = tensor.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < tensor.dim() && extent != 0; ++d) {
    extent += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const at::Tensor memory = at::empty({extent}, tensor.options().requires_grad(false));
  const at::Tensor copy = memory.as_strided(tensor.sizes(), tensor.strides());
  // Copies the whole memory range once, so expanded elements also share memory in the copy.
  memory.copy_(tensor.detach().as_strided({extent}, {1}));
  return copy;
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {
  if (!has_host_memory(a.device())) return at::equal(a, b);
  if (!a.is_contiguous() || !b.is_contiguous()) return is_same(a.contiguous(), b.contiguous());
  // Compares bits, so NaN equals NaN, and -0 differs from 0.
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

bool is_overwritten(const GraphInput& graph_input) {
  if (!graph_input.as_read.defined() || !graph_input.data.defined()) return false;
  const PlainStateGuard plain;
  return !is_same(graph_input.data, graph_input.as_read);
}

}  // namespace autobatch

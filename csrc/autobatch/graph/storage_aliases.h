// Memory that is reached through several version counters (`x.data`, `set_`): no counter tells of
// all writes to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace autobatch {

struct GraphInput;

// Storages, of all threads. A weak reference keeps the address of each, so that no other storage is
// taken for it.
class StorageSet {
 public:
  void add(const c10::Storage& storage);
  bool any() const { return any_.load(std::memory_order_relaxed); }
  bool has(const c10::Storage& storage);

 private:
  void sweep();

  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  size_t sweep_at_ = 64;
  std::atomic<bool> any_{false};
};

// From now on the memory of this tensor is reached through two version counters.
void note_alias(const at::TensorBase& tensor);
// Whether any memory is; and whether this is.
bool any_aliases();
bool has_aliases(const c10::Storage& storage);
// Whether another tensor, with a version counter of its own, may write to its memory.
bool may_change_unseen(const at::Tensor& tensor);

// What the tensor holds now, in memory of its own of the same strides.
at::Tensor copy_as_read(const at::Tensor& tensor);

// Whether both hold the same, bit by bit on a CPU: NaN is NaN, -0 is not 0.
bool is_same(const at::Tensor& a, const at::Tensor& b);
// Whether the memory holds something else by now than what was read. False where that was not kept.
bool is_overwritten(const GraphInput& graph_input);

}  // namespace autobatch

// Finds memory that is shared by tensors with different version counters (`x.data`, `set_`). No
// single counter counts all writes to this memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace autobatch {

struct GraphInput;

// A set of storages, for all threads. The set keeps a weak reference to each storage, so that the
// address is not reused for another storage.
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

// Records that tensors with different version counters share the memory of this tensor.
void note_alias(const at::TensorBase& tensor);
// Whether note_alias recorded any storage (any_aliases), or this storage (has_aliases).
bool any_aliases();
bool has_aliases(const c10::Storage& storage);
// Whether another tensor with a separate version counter may write to the memory of this tensor.
bool may_change_unseen(const at::Tensor& tensor);

// Returns a copy of the tensor in separate memory. The copy has the same strides.
at::Tensor copy_as_read(const at::Tensor& tensor);

// Whether two tensors of the same sizes and dtype have the same content. On a CPU bits are
// compared, so NaN equals NaN and -0 differs from 0. On other devices values are compared.
bool is_same(const at::Tensor& a, const at::Tensor& b);
// Whether the content of the graph input's memory differs from GraphInput::as_read. Returns false
// if `as_read` was not kept.
bool is_overwritten(const GraphInput& graph_input);

}  // namespace autobatch

#include "autobatch/graph/foreign_memory.h"

#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/storage_aliases.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include <cstring>

namespace autobatch {
namespace {

StorageSet& exported() {
  static auto* storages = new StorageSet();
  return *storages;
}

// Calls `visit` with each graph input that reads the storage itself, and not a copy of it.
template <class Visit>
void for_each_reader(Graph& graph, const c10::Storage& storage, const Visit& visit) {
  graph.for_each_graph_input([&](GraphInput& input) {
    if (input.is_copy || !input.data.defined() || !input.data.has_storage()) return;
    if (input.data.storage().is_alias_of(storage)) visit(input);
  });
}

// Computes the pending views of the storage, so that the views continue to share the memory of the
// storage.
void make_views_real(Graph& graph, const c10::Storage& storage) {
  c10::SmallVector<PendingTensor*, 8> pending;
  for_each_reader(graph, storage, [&](const GraphInput& input) {
    for (ValueId id = graph.value(input.value).next_view; id != kNone;) {
      const Value& view = graph.value(id);
      if (view.tensor != nullptr) pending.push_back(view.tensor);
      id = view.next_view;
    }
  });
  if (!pending.empty()) ensure_real(pending, "the export of a tensor's memory (NumPy, DLPack)");
}

}  // namespace

bool is_given_away(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  if (exported().has(storage)) return true;
  // When memory is given away, PyTorch marks its storage as not resizable and never removes the
  // mark. Parameters are usually given away only for inspection. The foreign array holds a
  // reference to the storage. If use_count() is 1, the array no longer exists, and the parameter is
  // safe again. Marked tensors that do not require grad are mostly buffers that foreign code
  // continues to use.
  if (storage.resizable()) return false;
  return !tensor.requires_grad() || storage.use_count() > 1;
}

// While the graph holds a storage, PyTorch's allocator cannot reuse the memory of the storage.
// Memory of NumPy, DLPack or a user's pointer can be refilled without an op. Memory that was given
// away can also be refilled without an op.
bool owns_memory(const at::Tensor& tensor) {
  if (!has_host_memory(tensor.device())) return true;
  if (is_given_away(tensor)) return false;
  static const auto ours = [] {
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    return at::empty({0}).storage().data_ptr().get_deleter();
  }();
  return tensor.numel() == 0 || tensor.storage().data_ptr().get_deleter() == ours ||
         is_pooled(tensor);
}

void note_given_away(const at::Tensor& tensor, bool unmarked) {
  if (!has_host_memory(tensor.device()) || !tensor.has_storage()) return;
  if (unmarked) exported().add(tensor.storage());
  // In eager mode, backward reads the content that saved tensors have when backward runs. After
  // note_alias(), the backward of this library also detects writes by foreign code.
  if (unmarked || tensor.storage().use_count() > 1) note_alias(tensor);
}

void keep_what_is_read(Graph& graph, const at::Tensor& tensor) {
  if (!has_host_memory(tensor.device()) || !graph.reads_storage_of(tensor)) return;
  make_views_real(graph, tensor.storage());
  for_each_reader(graph, tensor.storage(), [](GraphInput& input) {
    input.data = copy_as_read(input.data);
    input.is_copy = true;
    input.counted = false;
  });
}

bool is_as_copied(const at::Tensor& tensor, const at::Tensor& copy) {
  if (tensor.sizes() != copy.sizes() || tensor.scalar_type() != copy.scalar_type()) return false;
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::NoGradGuard no_grad;
  at::Tensor now = tensor.detach();
  if (!has_host_memory(now.device())) return at::equal(now, copy);
  if (!copy.is_non_overlapping_and_dense()) {  // the copy is from keep_what_is_read
    return now.strides() == copy.strides() && is_as_copied(now.contiguous(), copy.contiguous());
  }
  if (now.strides() != copy.strides()) now = now.clone(at::MemoryFormat::Preserve);
  if (now.strides() != copy.strides()) return false;
  return std::memcmp(now.const_data_ptr(), copy.const_data_ptr(), now.nbytes()) == 0;
}

}  // namespace autobatch

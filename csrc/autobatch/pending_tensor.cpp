#include "autobatch/pending_tensor.h"

#include "autobatch/scope.h"
#include "autobatch/thread_state.h"

#include <c10/util/Exception.h>

#include <utility>

namespace autobatch {
namespace {

// Of an ordinary dense tensor on this device, with the deferral key on top.
c10::DispatchKeySet pending_keys(c10::Device device) {
  constexpr c10::DispatchKeySet kOnCpu({c10::DispatchKey::CPU, compat::kDeferKey});
  if (device.is_cpu()) return kOnCpu;
  return c10::DispatchKeySet(
      {c10::computeDispatchKey(std::nullopt, c10::kStrided, device), compat::kDeferKey});
}

// While it lives, new tensors have neither autograd's keys nor a version counter, an object of its
// own: a pending tensor gets those of its memory in the end.
class AsInference {
 public:
  AsInference() : before_(state().get_inference_mode()) { state().set_inference_mode(true); }
  ~AsInference() { state().set_inference_mode(before_); }
  AsInference(const AsInference&) = delete;
  AsInference& operator=(const AsInference&) = delete;

  c10::DispatchKeySet keys(c10::Device device) const { return pending_keys(device); }

 private:
  static c10::AutogradState& state() { return *ThreadState::current().autograd; }

  bool before_;
};

}  // namespace

PendingTensor::PendingTensor(Graph* graph, ValueId value)
    : PendingTensor(graph, value, graph->value(value)) {
  const Value& base = graph->value(graph->value(value).base);
  if (!base.is_outside()) return;
  storage_offset_ += graph->tape().outside[base.index].data.storage_offset();
}

PendingTensor::PendingTensor(Graph* graph, ValueId id, const Value& value)
    : c10::TensorImpl(AsInference().keys(value.device), c10::scalarTypeToTypeMeta(value.dtype),
                      value.device),
      graph_(graph),
      value_(id) {
  if (!ThreadState::current().autograd->get_inference_mode()) {
    key_set_ = key_set_ | c10::getAutogradRelatedKeySetFromBackend(key_set_.highestBackendKey());
  }
  const Geometry& g = *value.geometry;
  if (!g.contiguous || g.dim() > 3) {
    set_sizes_and_strides(g.sizes, g.strides, value.offset);
    return;
  }
  // What that would find out again for each tensor is known: the flags are as a new tensor's.
  sizes_and_strides_.resize(g.sizes.size());
  for (size_t d = 0; d < g.sizes.size(); ++d) {
    sizes_and_strides_.size_at_unchecked(d) = g.sizes[d];
    sizes_and_strides_.stride_at_unchecked(d) = g.strides[d];
  }
  numel_ = g.numel;
  storage_offset_ = value.offset;
}

void PendingTensor::keep_memory() {
  if (!std::exchange(is_kept_, true)) c10::raw::weak_intrusive_ptr::incref(this);
}

void PendingTensor::release_memory() {
  if (std::exchange(is_kept_, false)) c10::raw::weak_intrusive_ptr::decref(this);
}

c10::intrusive_ptr<PendingTensor> PendingTensor::hold() {
  auto weak = c10::weak_intrusive_ptr<PendingTensor>::reclaim(this);
  auto held = weak.lock();
  weak.release();
  return held;
}

void PendingTensor::release_resources() {
  if (owner_ != std::this_thread::get_id()) {
    Graph::note_orphan(*this);
  } else if (Graph* graph = leave()) {
    graph->detach(value());
    release_memory();
  }
  c10::TensorImpl::release_resources();
}

void PendingTensor::become(const at::Tensor& memory, int64_t offset) {
  leave();
  release_memory();
  storage_ = memory.storage();
  storage_offset_ = offset;
  key_set_ = memory.key_set();
  version_counter_ = memory.unsafeGetTensorImpl()->version_counter();
}

void PendingTensor::lose(std::shared_ptr<const std::string> reason) {
  lost_ = std::move(reason);
  if (leave() != nullptr) release_memory();
}

void PendingTensor::check_not_lost() const {
  TORCH_CHECK(lost_ == nullptr,
              "torch_autobatch: this tensor was captured in a batch() block and never computed: ",
              *lost_, ". Run the block again, or outside batch(), to get its value.");
}

void PendingTensor::require_data() const {
  check_not_lost();
  if (is_pending()) {
    ensure_real({const_cast<PendingTensor*>(this)}, "a raw read of a pending tensor's data");
  }
}

bool PendingTensor::has_storage() const {
  require_data();
  return c10::TensorImpl::has_storage();
}

const c10::Storage& PendingTensor::storage() const {
  require_data();
  return c10::TensorImpl::storage();
}

c10::intrusive_ptr<c10::TensorImpl> PendingTensor::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const {
  require_data();
  return c10::TensorImpl::shallow_copy_and_detach(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> PendingTensor::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const {
  require_data();
  return c10::TensorImpl::shallow_copy_and_detach(std::move(version_counter),
                                                  allow_tensor_metadata_change);
}

void PendingTensor::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  require_data();
  if (const PendingTensor* source = as_pending(impl.get())) source->require_data();
  c10::TensorImpl::shallow_copy_from(impl);
}

void ensure_real(at::ArrayRef<PendingTensor*> tensors, const std::string& reason) {
  for (PendingTensor* tensor : tensors) {
    tensor->check_not_lost();
    if (tensor->is_pending()) compute_owned(tensors, *tensor->graph(), reason);
    tensor->check_not_lost();
  }
}

void ensure_real(const at::TensorBase& tensor, const std::string& reason) {
  if (PendingTensor* pending = as_pending(tensor)) ensure_real({pending}, reason);
}

}  // namespace autobatch

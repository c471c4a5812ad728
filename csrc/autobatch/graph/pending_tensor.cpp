#include "autobatch/graph/pending_tensor.h"

#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/graph/thread_state.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace autobatch {
namespace {

// Returns the dispatch keys that a new ordinary dense tensor on this device would have, plus the
// capture key.
c10::DispatchKeySet pending_keys(c10::Device device) {
  using c10::DispatchKeySet;
  const bool is_inference = CaptureState::current().autograd->get_inference_mode();
  constexpr DispatchKeySet kOnCpu(
      {compat::kDeferKey, c10::DispatchKey::CPU, c10::DispatchKey::AutocastCPU});
  constexpr DispatchKeySet kRecordedOnCpu =
      kOnCpu | DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU});
  if (device.is_cpu()) return is_inference ? kOnCpu : kRecordedOnCpu;
  const c10::DispatchKey key = c10::computeDispatchKey(std::nullopt, c10::kStrided, device);
  const c10::BackendComponent backend = c10::toBackendComponent(key);
  const DispatchKeySet keys = DispatchKeySet({compat::kDeferKey, key}) |
                              DispatchKeySet(c10::getAutocastRelatedKeySetFromBackend(backend));
  return is_inference ? keys : keys | c10::getAutogradRelatedKeySetFromBackend(backend);
}

// While the guard exists, new tensors get no autograd keys and no version counter. (A version
// counter is a separate allocation.) A pending tensor gets its keys from look_like and its version
// counter from become.
class AsInference {
 public:
  AsInference() : before_(state().get_inference_mode()) { state().set_inference_mode(true); }
  ~AsInference() { state().set_inference_mode(before_); }
  AsInference(const AsInference&) = delete;
  AsInference& operator=(const AsInference&) = delete;

  c10::DispatchKeySet keys(c10::Device device) const {
    return c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, c10::kStrided, device));
  }

 private:
  static c10::AutogradState& state() { return *CaptureState::current().autograd; }

  bool before_;
};

// Returns the storage offset of the graph input that the value is a view of, else 0. Value::offset
// counts from the start of the graph input.
int64_t offset_of_base(const Graph& graph, ValueId id) {
  const Value& base = graph.value(graph.value(id).base);
  return base.is_graph_input() ? graph.tape().graph_inputs[base.index].data.storage_offset() : 0;
}

}  // namespace

PendingTensor::PendingTensor(Graph* graph, ValueId value)
    : PendingTensor(graph, value, graph->value(value)) {
  storage_offset_ += offset_of_base(*graph, value);
}

PendingTensor::PendingTensor(Graph* graph, ValueId id, const Value& value)
    : c10::TensorImpl(AsInference().keys(value.device), c10::scalarTypeToTypeMeta(value.dtype),
                      value.device),
      graph_(graph),
      value_(id) {
  look_like(value);
}

// Sets the metadata to the metadata of a new tensor that stands for the value.
void PendingTensor::look_like(const Value& value) {
  key_set_ = pending_keys(value.device);
  if (value.requires_grad && own_meta_ == nullptr) {
    auto meta = std::make_unique<PendingMeta>();
    own_meta_ = meta.get();
    set_autograd_meta(std::move(meta));
  }
  if (own_meta_ != nullptr) own_meta_->requires_grad_ = value.requires_grad;
  const Geometry& g = *value.geometry;
  const bool is_plain = g.contiguous && g.dim() <= 3;
  if (!is_plain || !has_new_flags_) {
    set_sizes_and_strides(g.sizes, g.strides, value.offset);
    has_new_flags_ = is_plain;
    return;
  }
  // The geometry already has the values that set_sizes_and_strides would compute for each tensor.
  const size_t dim = g.sizes.size();
  if (sizes_and_strides_.size() != dim) sizes_and_strides_.resize(dim);
  std::copy_n(g.sizes.data(), dim, sizes_and_strides_.sizes_data());
  std::copy_n(g.strides.data(), dim, sizes_and_strides_.strides_data());
  numel_ = g.numel;
  storage_offset_ = value.offset;
}

bool PendingTensor::rest(const at::Tensor& last) {
  PendingTensor* tensor = as_pending(last);
  if (tensor == nullptr || !tensor->may_rest_ || last.use_count() != 1) return false;
  const size_t own_references = tensor->is_kept_ ? 2 : 1;
  if (!tensor->is_pending() || tensor->owner_ != std::this_thread::get_id() ||
      last.weak_use_count() != own_references || tensor->extra_meta_ != nullptr ||
      tensor->is_wrapped_number()) {
    return false;
  }
  tensor->leave()->detach(tensor->value());
  if (tensor->autograd_meta() != tensor->own_meta_) {
    tensor->set_autograd_meta(nullptr);
    tensor->own_meta_ = nullptr;
  } else if (tensor->own_meta_ != nullptr && !compat::is_as_made(*tensor->own_meta_)) {
    std::destroy_at(tensor->own_meta_);
    ::new (static_cast<void*>(tensor->own_meta_)) PendingMeta();
  }
  return true;
}

void PendingTensor::wake(Graph* graph, ValueId id) {
  const Value& value = graph->value(id);
  graph_.store(graph, std::memory_order_relaxed);
  value_.store(id, std::memory_order_relaxed);
  owner_ = std::this_thread::get_id();
  data_type_ = c10::scalarTypeToTypeMeta(value.dtype);
  device_opt_ = value.device;
  look_like(value);
  storage_offset_ += offset_of_base(*graph, id);
  graph->attach(id, this);
}

void PendingTensor::end_rest() { release_memory(); }

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

c10::intrusive_ptr<PendingTensor> PendingTensor::lose(std::shared_ptr<const std::string> reason) {
  lost_ = std::move(reason);
  const std::unique_ptr<Requests> requests = std::move(requests_);
  if (leave() != nullptr) release_memory();
  return requests != nullptr ? std::move(requests->tensor) : nullptr;
}

void PendingTensor::add_request(Request request) {
  if (requests_ == nullptr) {
    requests_ = std::make_unique<Requests>();
    requests_->tensor = c10::intrusive_ptr<PendingTensor>::reclaim_copy(this);
  }
  requests_->all.push_back(request);
}

bool PendingTensor::has_request(Request request) const {
  return has_requests() && std::ranges::find(requests_->all, request) != requests_->all.end();
}

void PendingTensor::answer_requests() {
  const std::unique_ptr<Requests> requests = std::move(requests_);
  const at::Tensor tensor(requests->tensor);
  for (const Request request : requests->all) request(tensor);
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

// A profiler that records the arguments of ops calls this function while the profiler makes a
// record. A nested record or an exception would break the profiler's lists of arguments: the
// process would end, or the profile would be lost. Therefore nothing is recorded here, and errors
// are dropped. The op raises the errors later.
bool PendingTensor::has_storage() const {
  if (!is_pending() && lost_ == nullptr) return c10::TensorImpl::has_storage();
  if (!profiler_records_arguments()) {
    require_data();
    return c10::TensorImpl::has_storage();
  }
  const at::RecordFunctionGuard no_records(/*is_enabled=*/false);
  try {
    require_data();
  } catch (const std::exception&) {
    return false;
  }
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

at::Tensor make_pending(Graph& graph, ValueId id) {
  auto impl = c10::make_intrusive<PendingTensor>(&graph, id);
  graph.attach(id, impl.get());
  return at::Tensor(std::move(impl));
}

bool has_requests(const Tape& tape, ValueId base) {
  for (ValueId id = base; id != kNone; id = tape.values[id].next_view) {
    const PendingTensor* tensor = tape.values[id].tensor;
    if (tensor != nullptr && tensor->has_requests()) return true;
  }
  return false;
}

// Accepts the keys of dense tensors on devices whose memory has addresses in this process.
bool is_plain(const c10::TensorImpl& tensor) {
  using enum c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlainKeys(
      {compat::kDeferKey, ADInplaceOrView, CPU, CUDA, HIP, XPU, MPS, PrivateUse1, AutogradCPU,
       AutogradCUDA, AutogradHIP, AutogradXPU, AutogradMPS, AutogradPrivateUse1, AutocastCPU,
       AutocastCUDA, AutocastXPU, AutocastMPS, AutocastPrivateUse1});
  // The raw representation includes the bits of backends, which DispatchKeySet's `-` would ignore.
  return (tensor.key_set().raw_repr() & ~kPlainKeys.raw_repr()) == 0;
}

}  // namespace autobatch

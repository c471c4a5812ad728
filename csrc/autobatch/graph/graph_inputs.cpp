#include "autobatch/common/device_traits.h"
#include "autobatch/graph/foreign_memory.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/storage_aliases.h"
#include "autobatch/graph/tensor_views.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace autobatch {
namespace {

// Returns tensor.const_data_ptr(), but without the checks of const_data_ptr(). This function must
// be fast, because each call of a cell compares the addresses of all of its weights.
const void* address_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::Storage& storage = impl.unsafe_storage();
  if (!storage || impl.numel() == 0) return nullptr;
  return static_cast<const char*>(storage.data()) +
         static_cast<size_t>(impl.storage_offset()) * impl.itemsize();
}

bool wants_gradient(const at::Tensor& tensor) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(
      tensor.unsafeGetTensorImpl()->autograd_meta());
  return meta != nullptr && (meta->requires_grad_ || meta->requires_grad());
}

// Whether the tensor still has the geometry and the dtype that it had when it was captured. After
// `x.data = x.data.t()`, the tensor has another geometry, but the same address.
bool is_laid_out_like(const at::Tensor& tensor, const at::Tensor& data) {
  const c10::TensorImpl &now = *tensor.unsafeGetTensorImpl(), &then = *data.unsafeGetTensorImpl();
  return now.sizes() == then.sizes() && now.strides() == then.strides() &&
         now.dtype() == then.dtype();
}

// Whether the content that was captured is still in the tensor's memory, and no foreign code may
// change it.
bool still_holds(const GraphInput& input) {
  const at::Tensor& tensor = input.tensor;
  // After a write, the tensor becomes another graph input. Ops that read the old content ran before
  // the write.
  if (input.counted && input.counter.current_version() != input.version) return false;
  if (is_overwritten(input)) return false;
  if (input.is_copy) return is_as_copied(tensor, input.data);
  // If the memory of a graph input is given away before pending ops have read it, the graph input
  // becomes a copy (foreign_memory.h).
  return address_of(tensor) == address_of(input.data) && is_laid_out_like(tensor, input.data) &&
         (wants_gradient(tensor) || !has_host_memory(tensor.device()) || !is_given_away(tensor));
}

// Returns a tensor that keeps the current memory even after `tensor.data = ...`.
at::Tensor alias_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const bool plain = is_plain(impl) && as_pending(&impl) == nullptr && !impl.is_wrapped_number();
  if (!plain) return detached_alias(tensor);
  return strided_view(tensor, tensor.sizes(), tensor.strides(), 0);  // strided_view is faster
}

bool has_expanded_dims(const Geometry& geometry) {
  const auto& strides = geometry.strides;
  return std::count(strides.begin(), strides.end(), 0) != 0;
}

// Whether the tensor may be a new tensor object for the memory of a weight. Without autograd, each
// `W.t()` makes a new tensor without a history.
bool may_view_weight(const at::Tensor& tensor, bool requires_grad) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const bool has_history = requires_grad && c10::GradMode::is_enabled();
  return !has_history && storage && storage.use_count() > 1 && !may_change_unseen(tensor);
}

// Returns the weight that has the memory and the metadata of the tensor, or kNone. `index` contains
// the weights by the address of their data.
ValueId find_weight(const std::unordered_multimap<const void*, ValueId>& index, const Tape& tape,
                    const at::Tensor& tensor) {
  auto [first, last] = index.equal_range(tensor.const_data_ptr());
  for (; first != last; ++first) {
    const Value& seen = tape.values[first->second];
    if (seen.geometry->sizes == tensor.sizes() && seen.geometry->strides == tensor.strides() &&
        seen.dtype == tensor.scalar_type() && seen.requires_grad == tensor.requires_grad() &&
        still_holds(tape.graph_inputs[seen.index])) {
      return first->second;
    }
  }
  return kNone;
}

// Whether elements share memory although they need separate memory. The elements of expanded
// indices and masks need no separate memory.
bool needs_dense(const at::Tensor& tensor, const Geometry& geometry) {
  if (!geometry.overlapping) return false;
  return !at::isIntegralType(tensor.scalar_type(), true) || !has_expanded_dims(geometry);
}

}  // namespace

ValueId Graph::value_of(const at::Tensor& tensor, bool weight) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (const PendingTensor* pending = as_pending(impl)) return current(pending->value());
  if (const ValueId found = find_graph_input(tensor); found != kNone) {
    tape_.graph_inputs[tape_.values[found].index].is_weight |= weight;
    return found;
  }
  return add_graph_input(tensor, weight);
}

bool Graph::still_is(ValueId id, const at::Tensor& tensor) const {
  const Value& seen = tape_.values[id];
  return seen.requires_grad == wants_gradient(tensor) &&
         still_holds(tape_.graph_inputs[seen.index]);
}

ValueId Graph::find_graph_input(const at::Tensor& tensor) const {
  return find_graph_input(tensor, wants_gradient(tensor));
}

ValueId Graph::find_graph_input(const at::Tensor& tensor, bool requires_grad) const {
  const auto found = graph_input_index_.find(tensor.unsafeGetTensorImpl());
  if (found == graph_input_index_.end()) {
    return may_view_weight(tensor, requires_grad) ? find_weight(weight_index_, tape_, tensor)
                                                  : kNone;
  }
  const Value& seen = tape_.values[found->second];
  return seen.requires_grad == requires_grad && still_holds(tape_.graph_inputs[seen.index])
             ? found->second
             : kNone;
}

bool Graph::describe_graph_input(const at::Tensor& tensor, Value& value) const {
  value.geometry = geometries_->intern(tensor.sizes(), tensor.strides());
  value.dtype = tensor.scalar_type();
  value.device = tensor.device();
  value.requires_grad = tensor.requires_grad();
  return !needs_dense(tensor, *value.geometry) && owns_memory(tensor) && !is_stale(tensor);
}

ValueId Graph::weight_value_of(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  // While gradients are recorded, a tensor that requires grad has its own history.
  const bool is_distinct = tensor.requires_grad() && c10::GradMode::is_enabled();
  const bool is_known = as_pending(impl) != nullptr || graph_input_index_.count(impl) != 0;
  if (is_distinct || is_known) return value_of(tensor, true);
  const ValueId known = find_weight(weight_index_, tape_, tensor);
  if (known != kNone) return known;
  const ValueId id = add_graph_input(tensor, true);
  weight_index_.emplace(tensor.const_data_ptr(), id);
  return id;
}

ValueId Graph::add_graph_input(const at::Tensor& tensor, bool weight) {
  GraphInput input;
  input.tensor = tensor;
  input.is_weight = weight;
  input.serial = new_serial(tensor.requires_grad());
  const Geometry* geometry = geometries_->intern(tensor.sizes(), tensor.strides());
  input.data = alias_of(tensor);
  input.is_odd = geometry->overlapping && !has_expanded_dims(*geometry);
  // Foreign memory may be refilled for the next instance, so its content is copied at every use. A
  // weight is copied again only if its content has changed.
  if (needs_dense(tensor, *geometry) || !owns_memory(tensor)) {
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    const at::NoGradGuard no_grad;
    input.is_copy = true;
    // The copy keeps the order of the dimensions, because elementwise results of the tensor have
    // the same order.
    input.data = tensor.detach().clone(at::MemoryFormat::Preserve);
    input.given = geometry;
    geometry = geometries_->intern(tensor.sizes(), input.data.strides());
  }
  // An inference tensor has no version counter, not even after an assignment to its data.
  if (!input.is_copy && tensor.unsafeGetTensorImpl()->version_counter().enabled()) {
    input.counter = tensor.unsafeGetTensorImpl()->version_counter();
    input.version = input.counter.current_version();
    input.counted = true;
  }
  // Weights are not copied, because they may be large. A copy of a weight is not needed, because
  // programs write to aliases of a weight only between steps.
  if (!input.is_copy && !weight && may_change_unseen(tensor)) {
    input.as_read = copy_as_read(input.data);
  }
  const auto id = static_cast<ValueId>(tape_.values.size());
  input.value = id;
  Value value;
  value.index = static_cast<uint32_t>(tape_.graph_inputs.size());
  value.base = id;
  value.geometry = geometry;
  value.dtype = tensor.scalar_type();
  value.device = tensor.device();
  value.requires_grad = tensor.requires_grad();
  tape_.values.push_back(value);
  if (!input.is_copy || weight) graph_input_index_[tensor.unsafeGetTensorImpl()] = id;
  tape_.graph_inputs.push_back(std::move(input));
  return id;
}

void Graph::forget_graph_input(const GraphInput& graph_input) {
  const auto known = graph_input_index_.find(graph_input.tensor.unsafeGetTensorImpl());
  if (known != graph_input_index_.end() && known->second == graph_input.value)
    graph_input_index_.erase(known);
}

void Graph::need_gradient(ValueId id) {
  const Value& base = tape_.values[tape_.values[id].base];
  if (!base.is_graph_input() || !base.requires_grad) return;
  GraphInput& input = tape_.graph_inputs[base.index];
  if (input.edge.is_valid() || !input.tensor.defined()) return;
  // After a write to the base of a view, autograd replays the view. The replayed ops must not be
  // captured.
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  input.edge = torch::autograd::impl::gradient_edge(input.tensor);
}

}  // namespace autobatch

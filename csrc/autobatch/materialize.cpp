#include "autobatch/materialize.h"

#include "autobatch/autograd.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <unordered_map>

namespace autobatch {
namespace {

std::shared_ptr<const std::string> reason_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return std::make_shared<const std::string>(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return std::make_shared<const std::string>(error.what());
  } catch (...) {
    return std::make_shared<const std::string>("an unknown error");
  }
}

// Storage for the whole result `base`, copied out of its slab: an in-place write to it must not
// reach its batch siblings or what backward kept, and saving it must not write the whole slab.
at::Tensor own_copy(const FlushRecord& record, ValueId base) {
  const Value& value = record.tape.values[base];
  const Place& place = record.store.places[base];
  std::optional<c10::InferenceMode> inference;
  if (record.tape.nodes[value.node].signature->context.inference_mode) inference.emplace(true);
  at::Tensor copy = at::empty({value.geometry->extent},
                              at::TensorOptions().dtype(value.dtype).device(value.device));
  copy.copy_(record.store.slabs[place.slab].narrow(0, place.offset, value.geometry->extent));
  if (copy.is_inference()) return copy;
  const auto written = record.tape.versions.find(base);
  const uint32_t version = written == record.tape.versions.end() ? 0 : written->second;
  copy.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(version));
  return copy;
}

// Eager's views know their base, so that an in-place write to one is part of the base's history.
// `tensor` becomes such a view of `root`, which shares its memory.
void link_view(const at::Tensor& tensor, const at::Tensor& root, ViewKind kind) {
  using torch::autograd::CreationMeta;
  using torch::autograd::DifferentiableViewMeta;
  const CreationMeta made = kind == ViewKind::kNoGrad         ? CreationMeta::NO_GRAD_MODE
                            : kind == ViewKind::kOneOfSeveral ? CreationMeta::MULTI_OUTPUT_NODE
                                                              : CreationMeta::DEFAULT;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  at::Tensor base = root;
  if (base.is_view()) base = base._base();
  impl->set_autograd_meta(std::make_unique<DifferentiableViewMeta>(
      impl, torch::autograd::ViewInfo(base, nullptr, nullptr), std::nullopt,
      /*shared_view_info=*/false, made));
}

bool has_hooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && (!meta->hooks_.empty() || meta->cpp_hooks_list_ != nullptr);
}

bool was_computed(const FlushRecord& record, const std::vector<uint8_t>& ran, ValueId id) {
  const Value& value = record.tape.values[id];
  return value.is_outside() || ran[value.node];
}

// Whether autograd has something to say about it. One that was made a leaf (`requires_grad=True` on
// a captured factory) has no history.
bool is_recorded(const FlushRecord& record, const PendingTensor& tensor) {
  return tensor.requires_grad() && record.tape.values[tensor.value()].requires_grad;
}

// Whether eager has the view know its base.
bool is_linked(const Value& value, const Value& base) {
  return value.parent != kNone && value.kind != ViewKind::kDetached &&
         value.requires_grad == base.requires_grad;
}

// The user's tensor that owns the memory of a view, or an undefined one if nobody holds it.
at::Tensor root_of(const FlushRecord& record, const Value& base) {
  if (base.is_outside()) {
    const Outside& outside = record.tape.outside[base.index];
    return outside.is_copy ? at::Tensor() : outside.tensor;
  }
  if (base.tensor == nullptr) return {};
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(base.tensor));
}

}  // namespace

HeldTensors::HeldTensors(Graph& graph) {
  graph.settle_orphans();
  for (const Value& value : graph.tape().values) {
    if (value.tensor != nullptr) {
      tensors_.push_back(c10::intrusive_ptr<PendingTensor>::reclaim_copy(value.tensor));
    }
  }
}

void HeldTensors::materialize(const std::shared_ptr<FlushRecord>& record,
                              std::exception_ptr failure) {
  std::vector<uint8_t> ran(record->tape.nodes.size(), 0);
  for (NodeId node : record->order) ran[node] = 1;
  std::vector<PendingTensor*> computed;
  for (const auto& tensor : tensors_) {
    if (was_computed(*record, ran, tensor->value())) {
      computed.push_back(tensor.get());
      if (is_recorded(*record, *tensor)) record->held.push_back({tensor->value(), 0});
    } else {
      tensor->lose(reason_of(failure));
    }
  }
  const std::vector<torch::autograd::Edge> edges = make_autograd_nodes(record);
  std::unordered_map<ValueId, at::Tensor> memory;  // by base
  size_t next_edge = 0;
  for (PendingTensor* tensor : computed) {
    const Value& value = record->tape.values[tensor->value()];
    const Value& base = record->tape.values[value.base];
    const bool recorded = is_recorded(*record, *tensor);
    if (base.is_outside()) {
      const Outside& outside = record->tape.outside[base.index];
      tensor->become(outside.data, outside.data.storage_offset());
    } else {
      at::Tensor& own = memory[value.base];
      if (!own.defined()) own = own_copy(*record, value.base);
      tensor->become(own, 0);
    }
    const at::Tensor handle(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensor));
    if (is_linked(value, base) && !has_hooks(handle) && !handle.is_inference()) {
      const at::Tensor root = root_of(*record, base);
      if (root.defined()) link_view(handle, root, value.kind);
    }
    if (!recorded) continue;
    torch::autograd::impl::materialize_autograd_meta(handle)->requires_grad_ = false;
    torch::autograd::impl::set_gradient_edge(handle, edges[next_edge++]);
  }
  tensors_.clear();
}

}  // namespace autobatch

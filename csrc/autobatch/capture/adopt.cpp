#include "autobatch/capture/adopt.h"

#include "autobatch/capture/capture.h"
#include "autobatch/capture/record_call.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

namespace autobatch {
namespace {

// Whether only the caller's object and the graph refer to the tensor and its storage.
bool is_referred_to_once(const Graph& graph, const at::Tensor& tensor) {
  if (tensor.weak_use_count() != 1) return false;
  if (tensor.use_count() == 1 && tensor.storage().use_count() == 1) return true;
  size_t tensors = 1, storages = 1;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (const GraphInput& graph_input : graph.tape().graph_inputs) {
    if (graph_input.tensor.is_same(tensor)) ++tensors;
    const bool shares = graph_input.data.defined() && graph_input.data.has_storage() &&
                        graph_input.data.storage().unsafeGetStorageImpl() == storage;
    if (shares) ++storages;
  }
  return tensor.use_count() == tensors && tensor.storage().use_count() == storages;
}

// Whether the autograd metadata is that of a new tensor that does not require grad.
bool is_as_made(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta == nullptr || (compat::is_as_made(*meta) && !meta->requires_grad_);
}

}  // namespace

at::Tensor pending_copy(const at::Tensor& tensor) {
  Scope* scope = capturing_scope();
  if (scope == nullptr || as_pending(tensor) != nullptr) return {};
  const Scope::Lock lock(*scope);
  Graph& graph = scope->graph();
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!is_plain(impl) || impl.is_wrapped_number() ||
      tensor.is_inference() != c10::InferenceMode::is_enabled()) {
    return {};
  }
  Value value;
  if (!is_as_made(tensor) || !tensor.is_non_overlapping_and_dense() || tensor.numel() == 0 ||
      !graph.describe_graph_input(tensor, value) || !is_referred_to_once(graph, tensor)) {
    return {};
  }
  static const OpInfo& clone = find_op("aten::clone", "");
  Recorded recorded;
  const std::vector<c10::IValue> arguments{tensor, c10::IValue()};
  if (!record_call(*scope, clone, arguments, recorded)) return {};
  const at::Tensor& copy = recorded.tensors[0];
  const PendingTensor* pending = as_pending(copy);
  if (pending == nullptr || copy.strides() != tensor.strides()) return {};
  if (!tensor.is_inference()) {
    graph.note_version(pending->value(), static_cast<uint32_t>(tensor._version()));
  }
  return copy;
}

TensorSwap::TensorSwap(const at::Tensor& copy) : copy_(*as_pending(copy)) {
  copy_.release_memory();
}

TensorSwap::~TensorSwap() { copy_.keep_memory(); }

}  // namespace autobatch

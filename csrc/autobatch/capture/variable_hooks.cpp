#include "autobatch/capture/variable_hooks.h"

#include "autobatch/backward/overwrites.h"
#include "autobatch/capture/autocast.h"
#include "autobatch/capture/capture.h"
#include "autobatch/capture/history_requests.h"
#include "autobatch/capture/memory_updates.h"
#include "autobatch/capture/record_call.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/scope/scope.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/VariableHooksInterface.h>

#include <mutex>
#include <optional>

namespace autobatch {
namespace {

using at::Tensor;
using at::TensorBase;

// Returns the pending tensor, if it is a result of an op of this thread's scope or a view of such a
// result. Returns null if eager's state is not known without computing the tensor.
const PendingTensor* own_result(const TensorBase& self) {
  const PendingTensor* pending = as_pending(self);
  const Scope* scope = pending != nullptr ? Scope::current() : nullptr;
  if (scope == nullptr || !pending->is_pending() || pending->graph() != &scope->graph()) {
    return nullptr;
  }
  const Graph& graph = scope->graph();
  const Value& value = graph.value(pending->value());
  const bool known = value.kind < ViewKind::kDetached &&
                     !self.unsafeGetTensorImpl()->is_inference() &&
                     !graph.value(value.base).is_graph_input();
  return known ? pending : nullptr;
}

// Whether it is certain that autograd does not treat the tensor as a view.
bool is_no_view(const TensorBase& self) {
  const PendingTensor* pending = own_result(self);
  if (pending == nullptr || shares_memory(Tensor(self))) return false;
  const Value& value = pending->graph()->value(pending->value());
  return value.base == pending->value() && value.call == 0;
}

// Returns the number of writes to the tensor's memory, if it is known.
std::optional<uint32_t> known_version(const TensorBase& self) {
  const PendingTensor* pending = own_result(self);
  if (pending == nullptr || shares_memory(Tensor(self))) return {};
  Graph& graph = *pending->graph();
  const ValueId base = graph.value(pending->value()).base;
  if (const Memory* memory = graph.memory_of(base)) return memory->version;
  const auto written = graph.tape().versions.find(base);
  return written == graph.tape().versions.end() ? 0 : written->second;
}

// Forwards all calls to PyTorch's own hooks, after computing the tensor if needed.
class Hooks final : public at::impl::VariableHooksInterface {
 public:
  explicit Hooks(at::impl::VariableHooksInterface* real) : real_(real) {}

  TensorBase tensor_data(const TensorBase& self) const override {
    return hooks(self, ".data").tensor_data(self);
  }
  TensorBase variable_data(const TensorBase& self) const override {
    const PendingTensor* pending = as_pending(self);
    Scope* scope = pending != nullptr ? capturing_scope() : nullptr;
    if (scope != nullptr && pending->graph() == &scope->graph()) {
      CellTrace::break_off("it accesses autograd's state", ".data");
      const Scope::Lock lock(*scope);
      if (const Tensor view = data_view(scope->graph(), *pending); view.defined()) return view;
    }
    TensorBase data = hooks(self, ".data").variable_data(self);
    note_alias(data);
    return data;
  }
  const compat::NodePtr& grad_fn(const TensorBase& self) const override {
    return hooks(self, "backward(), or a read of grad_fn").grad_fn(self);
  }
  unsigned _register_hook(const TensorBase& self,
                          std::function<TensorBase(const TensorBase&)> hook) const override {
    return hooks(self, "register_hook()")._register_hook(self, std::move(hook));
  }
  void remove_hook(const TensorBase& self, unsigned pos) const override {
    hooks(self, "the removal of a hook").remove_hook(self, pos);
  }
  bool is_view(const TensorBase& self) const override {
    if (is_no_view(self)) return false;
    return hooks(self, "a read of _is_view()").is_view(self);
  }
  const TensorBase& base(const TensorBase& self) const override {
    return hooks(self, "a read of _base").base(self);
  }
  const std::string& name(const TensorBase& self) const override {
    return hooks(self, "a read of name").name(self);
  }
  bool is_leaf(const TensorBase& self) const override {
    // A pending tensor is a leaf if it requires no grad or if requires_grad_() made it a new leaf.
    if (const PendingTensor* pending = as_pending(self)) {
      // Autocast calls this hook for all tensors.
      if (CastingGuard::is_casting() || is_result(*pending)) return false;
      const Scope* scope = capturing_scope();
      const bool is_known = scope != nullptr && pending->graph() == &scope->graph();
      if (!pending->requires_grad() || is_known) return true;
    }
    return hooks(self, "a read of is_leaf").is_leaf(self);
  }
  int64_t output_nr(const TensorBase& self) const override {
    return hooks(self, "a read of output_nr").output_nr(self);
  }
  void set_data(const TensorBase& self, const TensorBase& data) const override {
    ensure_real(data, "an assignment to .data");
    finish_updates(at::Tensor(self), "a replacement");
    hooks(self, "an assignment to .data").set_data(self, data);
  }
  TensorBase data(const TensorBase& self) const override { return variable_data(self); }
  int64_t _version(const TensorBase& self) const override {
    if (const std::optional<uint32_t> known = known_version(self)) return *known;
    return hooks(self, "a read of _version")._version(self);
  }
  void retain_grad(const TensorBase& self) const override {
    if (defer_request(self, [](const Tensor& tensor) { tensor.retain_grad(); })) return;
    hooks(self, "retain_grad()").retain_grad(self);
  }
  bool retains_grad(const TensorBase& self) const override {
    return hooks(self, "a read of retains_grad").retains_grad(self);
  }
  void _backward(const Tensor& self, at::TensorList inputs, const std::optional<Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    hooks(self, "backward()")._backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const TensorBase& self, bool value) const override {
    hooks(self, "requires_grad_()").requires_grad_(self, value);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op,
                                               c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    real_->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const TensorBase& self) const override {
    // AccumulateGrad reads the dtype of a new leaf (new_leaves.h) while the leaf becomes real.
    if (as_pending(self) != nullptr && Scope::is_flushing()) return self.scalar_type();
    return hooks(self, "a read of grad_dtype").grad_dtype(self);
  }
  void set_grad_dtype(const TensorBase& self,
                      const std::optional<c10::ScalarType>& dtype) const override {
    hooks(self, "an assignment to grad_dtype").set_grad_dtype(self, dtype);
  }

 private:
  at::impl::VariableHooksInterface& hooks(const TensorBase& self, const char* reason) const {
    if (as_pending(self) == nullptr) return *real_;
    CellTrace::break_off("it accesses autograd's state", reason);  // this is not a read of a value
    ensure_real(self, reason);
    return *real_;
  }

  at::impl::VariableHooksInterface* real_;
};

}  // namespace

void install_variable_hooks() {
  static std::once_flag once;
  std::call_once(once, [] { at::impl::SetVariableHooks(new Hooks(at::impl::GetVariableHooks())); });
}

}  // namespace autobatch

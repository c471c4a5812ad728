#include "autobatch/rules/local_autograd.h"

#include "autobatch/rules/generic.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>

namespace autobatch {
namespace {

using torch::jit::Stack;

// While an object of this class exists, any gradient that reaches the tensor is replaced with
// `gradient`.
class WholeGradient {
 public:
  WholeGradient(const at::Tensor& tensor, const at::Tensor& gradient)
      : tensor_(tensor),
        hook_(tensor.register_hook([gradient](const at::Tensor&) { return gradient; })) {}
  ~WholeGradient() { tensor_.remove_hook(hook_); }
  WholeGradient(const WholeGradient&) = delete;
  WholeGradient& operator=(const WholeGradient&) = delete;

 private:
  at::Tensor tensor_;
  unsigned hook_;
};

}  // namespace

Stack rebuild(const Signature& signature, at::ArrayRef<at::Tensor> operands) {
  Stack stack(signature.arguments.begin(), signature.arguments.end());
  const auto& schema = signature.op->handle.schema().arguments();
  if (signature.variadic != kNone) {
    stack[signature.variadic] = c10::List<at::Tensor>(operands);
    return stack;
  }
  for (size_t s = 0; s < signature.slots.size(); ++s) {
    const Slot& slot = signature.slots[s];
    if (slot.element == kNone) {
      if (operands[s].defined()) stack[slot.argument] = operands[s];
      continue;
    }
    const bool optional = is_optional_tensor_list(*schema[slot.argument].type());
    c10::IValue& list = stack[slot.argument];
    if (optional) {  // slots may be unsorted: in `x[:, i]` the operand is before the absent element
      const bool is_first = s == 0 || signature.slots[s - 1].argument != slot.argument;
      if (is_first) list = c10::List<std::optional<at::Tensor>>();
      auto typed = list.toList();
      if (typed.size() <= slot.element) typed.resize(slot.element + 1);
      if (operands[s].defined()) typed.set(slot.element, operands[s]);
    } else {
      if (slot.element == 0) list = c10::List<at::Tensor>();
      list.toTensorList().push_back(operands[s]);
    }
  }
  return stack;
}

std::vector<at::Tensor> results_of(const Stack& stack) {
  std::vector<at::Tensor> out;
  for (const c10::IValue& value : stack) {
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(tensor);
    } else {
      out.push_back(value.toTensor());
    }
  }
  return out;
}

at::Tensor leaf(const at::Tensor& tensor, bool needs_grad) {
  // The alias has its own version counter, because every batch that writes to a slab changes the
  // slab's version counter.
  at::Tensor out = detached_alias(tensor);
  if (needs_grad && (out.is_floating_point() || out.is_complex())) out.requires_grad_(true);
  return out;
}

std::vector<at::Tensor> differentiate(const LocalGraph& graph, std::vector<at::Tensor> gradients,
                                      uint32_t cut) {
  std::vector<at::Tensor> outputs, output_grads, inputs;
  std::optional<WholeGradient> whole;
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    if (!graph.outputs[k].requires_grad() || !gradients[k].defined()) continue;
    if (k == cut) {
      whole.emplace(graph.outputs[k], gradients[k]);
      continue;
    }
    outputs.push_back(graph.outputs[k]);
    output_grads.push_back(gradients[k]);
  }
  for (const at::Tensor& input : graph.inputs) {
    if (input.defined() && input.requires_grad()) inputs.push_back(input);
  }
  std::vector<at::Tensor> out(graph.inputs.size());
  if (outputs.empty() || inputs.empty()) return out;
  const auto grads = torch::autograd::grad(outputs, inputs, output_grads, /*retain_graph=*/true,
                                           /*create_graph=*/false, /*allow_unused=*/true);
  size_t next = 0;
  for (size_t s = 0; s < graph.inputs.size(); ++s) {
    if (!graph.inputs[s].defined() || !graph.inputs[s].requires_grad()) continue;
    out[s] = grads[next++];
    // A gradient that is always zero, such as the gradient of sgn, may be a tensor without memory.
    if (out[s].defined() && out[s]._is_zerotensor()) out[s] = at::zeros_like(graph.inputs[s]);
  }
  return out;
}

at::Tensor chain_gradient(const LocalGraph& graph, Rule::ResultDependency dependency,
                          const at::Tensor& gradient) {
  return torch::autograd::grad({graph.outputs[dependency.result]}, {graph.outputs[dependency.from]},
                               {gradient}, /*retain_graph=*/true)[0];
}

}  // namespace autobatch

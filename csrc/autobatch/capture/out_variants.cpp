#include "autobatch/capture/out_variants.h"

#include "autobatch/capture/record_call.h"
#include "autobatch/graph/graph.h"

#include <algorithm>

namespace autobatch {

bool run_out_variant(const OpInfo& op, torch::jit::Stack& stack) {
  if (op.write != WriteKind::kOut) return false;
  const at::ArrayRef<c10::IValue> arguments = torch::jit::last(stack, op.num_arguments);
  if (!arguments.back().isTensor() || !arguments.back().toTensor().defined()) return false;
  const at::Tensor out = arguments.back().toTensor();
  bool requires_grad = false;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      requires_grad = requires_grad || tensor.requires_grad();
    });
  }
  if (requires_grad && grad_mode()) return false;

  torch::jit::Stack call(arguments.begin(), arguments.end() - 1);
  op.functional->callBoxed(call);
  const at::Tensor result = call[0].toTensor();
  if (result.sizes() != out.sizes() || result.scalar_type() != out.scalar_type()) return false;
  out.copy_(result);
  torch::jit::drop(stack, op.num_arguments);
  stack.emplace_back(out);
  return true;
}

}  // namespace autobatch

#include "autobatch/capture/out_variants.h"

#include "autobatch/capture/record_call.h"
#include "autobatch/graph/pending_tensor.h"

namespace autobatch {
namespace {

// Whether the functional op followed by a copy to `out` has the same effect as eager. If `tensor`
// and `out` share memory, this is certain only for elementwise ops on the same elements: they read
// each element before they write it.
bool may_write(const OpInfo& op, const at::Tensor& tensor, const at::Tensor& out) {
  if (tensor.is_same(out)) return op.handle.hasTag(at::Tag::pointwise);
  const PendingTensor *read = as_pending(tensor), *written = as_pending(out);
  if (read == nullptr && written == nullptr) return !tensor.is_alias_of(out);
  if (read == nullptr || written == nullptr || read->graph() != written->graph()) return true;
  const Graph& graph = *read->graph();
  return graph.value(read->value()).base != graph.value(written->value()).base;
}

}  // namespace

bool run_out_variant(const OpInfo& op, torch::jit::Stack& stack) {
  if (op.write != WriteKind::kOut) return false;
  const at::ArrayRef<c10::IValue> arguments = torch::jit::last(stack, op.num_arguments);
  if (!arguments.back().isTensor() || !arguments.back().toTensor().defined()) return false;
  const at::Tensor out = arguments.back().toTensor();
  bool requires_grad = out.requires_grad(), is_plain = true;
  for (const c10::IValue& argument : arguments.slice(0, arguments.size() - 1)) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      requires_grad = requires_grad || tensor.requires_grad();
      is_plain = is_plain && may_write(op, tensor, out);
    });
  }
  if (!is_plain || (requires_grad && grad_mode())) return false;

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

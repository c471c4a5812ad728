#include "autobatch/rules/loop.h"

#include "autobatch/rules/rnn.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace autobatch {
namespace {

// Returns a new graph for member m. Used if the kept graph was released. The op saves no values, so
// its gradient does not depend on the operands' values. Therefore the operands are zeros.
LocalGraph call_on_zeros(const BatchView& batch, int64_t m) {
  const ContextGuard context(batch.signature().context);
  const at::AutoGradMode grad_mode(true);
  LocalGraph graph;
  for (size_t s = 0; s < batch.num_operands(); ++s) {
    const ValueId id = batch.operand(m, s);
    if (id == kNone) {
      graph.inputs.emplace_back();
      continue;
    }
    const Value& value = batch.tape().values[id];
    const auto options = value.options();
    graph.inputs.push_back(leaf(at::zeros(value.geometry->sizes, options), value.requires_grad));
  }
  graph.outputs = batch.signature().rule->eager(batch.signature(), graph.inputs, {});
  return graph;
}

// The rule of ops for which functorch computes the same values as eager, but not the same gradient.
// Batches that need a gradient run as a loop.
class DifferentiatedLoopRule final : public LoopRule {
 public:
  bool capture(NodeBuilder& builder) const override {
    return LoopRule::capture(builder) && builder.any_requires_grad() &&
           builder.context().grad_mode && builder.operand_value(0).geometry->numel > 1;
  }
};

// The rule of lstm_cell on a device that has a kernel for this op. The kernel computes h' and c' in
// one step, so there is no result dependency.
class KernelCellRule final : public LoopRule {
 public:
  bool capture(NodeBuilder& builder) const override {
    return builder.is_tensor(0) && has_lstm_kernel(builder.tensor(0)) && LoopRule::capture(builder);
  }
};

}  // namespace

LocalGraph call_single(const BatchView& batch, int64_t m, bool needs_grad) {
  const at::AutoGradMode grad_mode(needs_grad);
  LocalGraph graph;
  const Node& node = batch.node(m);
  for (size_t s = 0; s < node.num_operands; ++s) {
    const ValueId id = batch.operand(m, s);
    graph.inputs.push_back(id == kNone ? at::Tensor()
                                       : leaf(region_view(batch.region(m, id)),
                                              needs_grad && batch.tape().values[id].requires_grad));
  }
  std::vector<at::Tensor> places;
  for (uint32_t k = 0; k < node.num_values; ++k) {
    places.push_back(region_view(batch.result_region(m, k)));
  }
  graph.outputs = batch.signature().rule->eager(batch.signature(), graph.inputs, places);
  return graph;
}

bool has_gradient(const BackwardBatch& batch, int64_t m, size_t k) {
  return !is_custom_function(*batch.signature().op) ||
         (batch.reached(m) >> std::min<size_t>(k, 7) & 1) != 0;
}

void LoopRule::forward(Batch& batch) const {
  for (int64_t m = 0; m < batch.size(); ++m) {
    LocalGraph graph = call_single(batch, m, batch.needs_grad());
    for (size_t k = 0; k < graph.outputs.size(); ++k) {
      region_view(batch.result_region(m, k)).copy_(graph.outputs[k].detach());
    }
    if (batch.needs_grad()) batch.record().local.push_back(std::move(graph));
  }
}

void LoopRule::backward(BackwardBatch& batch) const {
  const bool freed = batch.record().local.empty();
  for (int64_t m = 0; m < batch.size(); ++m) {
    backward_of(batch, m, freed ? call_on_zeros(batch, m) : batch.member_local(m));
  }
}

void LoopRule::backward_chain(BackwardBatch& batch) const {
  std::vector<at::Tensor> gradients;
  for (int64_t m = 0; m < batch.size(); ++m) {
    gradients.push_back(chain_gradient(batch.member_local(m), dependency_,
                                       batch.member_grad(m, dependency_.result)));
  }
  batch.add_to_result(dependency_.from, at::stack(gradients));
}

at::Tensor LoopRule::replay_chain(at::ArrayRef<at::Tensor> operands, const at::Tensor& c) const {
  return lstm_output(operands, c);
}

void LoopRule::backward_again(BackwardBatch& batch) const {
  batch.check_unwritten();
  for (int64_t m = 0; m < batch.size(); ++m) {
    const ContextGuard context(batch.signature().context);
    backward_of(batch, m, call_single(batch, m, true));
  }
}

void LoopRule::backward_of(BackwardBatch& batch, int64_t m, const LocalGraph& graph) const {
  std::vector<at::Tensor> gradients;
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    gradients.push_back(has_gradient(batch, m, k) ? batch.member_grad(m, k) : at::Tensor());
  }
  const std::vector<at::Tensor> grads =
      differentiate(graph, std::move(gradients), batch.chained() ? dependency_.from : kNone);
  for (size_t s = 0; s < grads.size(); ++s) {
    if (grads[s].defined()) batch.member_add(m, s, grads[s]);
  }
}

const LoopRule& plain_loop() {
  static const LoopRule rule;
  return rule;
}

const Rule& loop_rule() { return plain_loop(); }

const Rule& differentiated_loop_rule() {
  static const DifferentiatedLoopRule rule;
  return rule;
}

const Rule& kernel_cell_rule() {
  static const KernelCellRule rule;
  return rule;
}

}  // namespace autobatch

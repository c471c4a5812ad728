// The rules for every op without a native one: functorch's own batching rules over the stacked
// operands, or a loop over the members. Gradients go through a local autograd graph on detached
// operands.
#include "autobatch/rules/fallback.h"

#include "autobatch/common/host_hooks.h"
#include "autobatch/rules/local_autograd.h"
#include "autobatch/rules/rnn.h"

#include <ATen/functorch/BatchedFallback.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <map>

namespace autobatch {
namespace {

using torch::jit::Stack;

// Disables functorch's warning about its own loop fallback: the report has this information.
class QuietFallback {
 public:
  QuietFallback() : before_(at::functorch::isVmapFallbackWarningEnabled()) {
    at::functorch::setVmapFallbackWarningEnabled(false);
  }
  ~QuietFallback() { at::functorch::setVmapFallbackWarningEnabled(before_); }
  QuietFallback(const QuietFallback&) = delete;
  QuietFallback& operator=(const QuietFallback&) = delete;

 private:
  bool before_;
};

// One level of vmap over dimension 0.
class VmapLevel {
 public:
  explicit VmapLevel(int64_t n)
      : level_(at::functorch::initAndPushDynamicLayer(at::functorch::TransformType::Vmap, n,
                                                      at::functorch::RandomnessType::Different)) {}
  ~VmapLevel() { at::functorch::popDynamicLayerAndDeleteMetadata(); }
  VmapLevel(const VmapLevel&) = delete;
  VmapLevel& operator=(const VmapLevel&) = delete;

  at::Tensor wrap(const at::Tensor& t) const { return at::functorch::makeBatched(t, 0, level_); }
  // Returns [n, *sizes]. A result that does not depend on the member is expanded.
  at::Tensor unwrap(const at::Tensor& t, int64_t n) const {
    auto* batched = at::functorch::maybeGetBatchedImpl(t);
    if (batched == nullptr || batched->level() != level_) {
      at::DimVector sizes{n};
      sizes.append(t.sizes().begin(), t.sizes().end());
      return t.expand(sizes);
    }
    return batched->value().movedim(batched->bdim(), 0);
  }

 private:
  int64_t level_;
};

// Whether the op's batching rule is wrong if operand 0 is not batched: a shared tensor is filled
// with the value of one instance (PyTorch 2.13).
bool stacks_first(const OpInfo& op) { return op.name == "aten::index_fill.int_Tensor"; }

// Whether the batched call takes the operand unstacked. Operands of random ops are stacked even if
// all members have the same one, so that each member draws its own numbers.
bool is_broadcast(BatchView& batch, size_t slot) {
  const OpInfo& op = *batch.signature().op;
  return !op.random && batch.shared(slot) && !(slot == 0 && stacks_first(op));
}

// Returns the operand, stacked or as it is. If it aliases the memory of a graph input, it gets the
// graph input's version counter: functorch's call may save other tensors than eager's would.
at::Tensor input_of(BatchView& batch, size_t slot, bool stacked, bool needs_grad) {
  const at::Tensor tensor = stacked ? batch.stacked(slot) : batch.single(slot);
  at::Tensor out = leaf(tensor, needs_grad);
  const Value& value = batch.operand_value(0, slot);
  const Value& base = batch.tape().values[value.base];
  if (!base.is_graph_input()) return out;
  const GraphInput& graph_input = batch.tape().graph_inputs[base.index];
  if (graph_input.counted && out.is_alias_of(graph_input.data)) {
    out.unsafeGetTensorImpl()->set_version_counter(graph_input.counter);
  }
  return out;
}

// Runs one call over all members and returns its graph, with stacked results.
LocalGraph call_batched(BatchView& batch, bool record) {
  const at::AutoGradMode grad_mode(record);
  const int64_t n = batch.size();
  LocalGraph graph;
  bool any_stacked = false;
  for (size_t s = 0; s < batch.num_operands(); ++s) {
    if (!batch.given(s)) {
      graph.inputs.emplace_back();
      graph.shared.push_back(1);
      continue;
    }
    bool needs = false;
    for (int64_t m = 0; record && m < n && !needs; ++m)
      needs = batch.operand_value(m, s).requires_grad;
    graph.shared.push_back(is_broadcast(batch, s) ? 1 : 0);
    any_stacked = any_stacked || graph.shared.back() == 0;
    graph.inputs.push_back(input_of(batch, s, graph.shared.back() == 0, needs));
  }
  const Signature& signature = batch.signature();
  if (!any_stacked) {  // every member computes the same
    Stack stack = rebuild(signature, graph.inputs);
    signature.op->handle.callBoxed(stack);
    for (const at::Tensor& out : results_of(stack)) {
      at::DimVector sizes{n};
      sizes.append(out.sizes().begin(), out.sizes().end());
      graph.outputs.push_back(out.expand(sizes));
    }
    return graph;
  }
  const QuietFallback quiet;
  const VmapLevel level(n);
  std::vector<at::Tensor> wrapped;
  for (size_t s = 0; s < graph.inputs.size(); ++s) {
    wrapped.push_back(graph.shared[s] != 0 ? graph.inputs[s] : level.wrap(graph.inputs[s]));
  }
  Stack stack = rebuild(signature, wrapped);
  signature.op->handle.callBoxed(stack);
  for (const at::Tensor& out : results_of(stack)) graph.outputs.push_back(level.unwrap(out, n));
  return graph;
}

// Returns a graph for member m after the kept one was released. The op saves no values, so any
// operand values give the right gradient.
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

bool matches(const at::Tensor& out, const Value& value, int64_t n) {
  return out.defined() && out.scalar_type() == value.dtype && out.size(0) == n &&
         out.sizes().slice(1) == at::IntArrayRef(value.geometry->sizes);
}

// Whether to pass a gradient for result k. A custom autograd.Function can distinguish a missing
// gradient from zeros. For all other ops zeros are passed.
bool has_gradient(const BackwardBatch& batch, int64_t m, size_t k) {
  return !is_custom_function(*batch.signature().op) ||
         (batch.reached(m) >> std::min<size_t>(k, 7) & 1) != 0;
}

class LoopRule : public Rule {
 public:
  explicit LoopRule(ResultDependency dependency = {}) : dependency_(dependency) {}

  std::string_view kind() const override { return "loop"; }
  bool infers() const override { return true; }
  bool below_autograd() const override { return false; }
  bool capture(NodeBuilder& builder) const override { return capture_everything(builder); }

  void forward(Batch& batch) const override {
    for (int64_t m = 0; m < batch.size(); ++m) {
      LocalGraph graph = call_single(batch, m, batch.needs_grad());
      for (size_t k = 0; k < graph.outputs.size(); ++k) {
        region_view(batch.result_region(m, k)).copy_(graph.outputs[k].detach());
      }
      if (batch.needs_grad()) batch.record().local.push_back(std::move(graph));
    }
  }

  ResultDependency result_dependency() const override { return dependency_; }

  void backward_chain(BackwardBatch& batch) const override {
    std::vector<at::Tensor> gradients;
    for (int64_t m = 0; m < batch.size(); ++m) {
      gradients.push_back(chain_gradient(batch.member_local(m), dependency_,
                                         batch.member_grad(m, dependency_.result)));
    }
    batch.add_to_result(dependency_.from, at::stack(gradients));
  }

  at::Tensor replay_chain(at::ArrayRef<at::Tensor> operands, const at::Tensor& c) const override {
    return lstm_output(operands, c);
  }

  void backward(BackwardBatch& batch) const override {
    const bool freed = batch.record().local.empty();
    for (int64_t m = 0; m < batch.size(); ++m) {
      backward_of(batch, m, freed ? call_on_zeros(batch, m) : batch.member_local(m));
    }
  }

  // Runs backward member by member where forward ran all members in one call.
  void backward_again(BackwardBatch& batch) const {
    batch.check_unwritten();
    for (int64_t m = 0; m < batch.size(); ++m) {
      const ContextGuard context(batch.signature().context);
      backward_of(batch, m, call_single(batch, m, true));
    }
  }

 private:
  void backward_of(BackwardBatch& batch, int64_t m, const LocalGraph& graph) const {
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

  ResultDependency dependency_;
};

// For ops of which functorch's batching rule gives eager's values but not eager's gradient: batches
// that record gradients run as a loop.
class DifferentiatedLoopRule final : public LoopRule {
 public:
  bool capture(NodeBuilder& builder) const override {
    return LoopRule::capture(builder) && builder.any_requires_grad() &&
           builder.context().grad_mode && builder.operand_value(0).geometry->numel > 1;
  }

  void forward(Batch& batch) const override {
    LoopRule::forward(batch);
    batch.record().rule = &loop_rule();
  }
};

// lstm_cell on a device that has a kernel for it. The kernel does not compute h' from c' by
// separate ops, so there is no result dependency.
class KernelCellRule final : public LoopRule {
 public:
  bool capture(NodeBuilder& builder) const override {
    return builder.is_tensor(0) && has_lstm_kernel(builder.tensor(0)) && LoopRule::capture(builder);
  }

  void forward(Batch& batch) const override {
    LoopRule::forward(batch);
    batch.record().rule = &loop_rule();
  }
};

// Ops whose batching rule, for an operand without dimensions, takes the batch dimension for
// dimension 0. All of ATen's ops with dimension arguments were examined, in PyTorch 2.13.
constexpr std::string_view kMiscountScalars[] = {"aten::roll", "aten::_softmax_backward_data",
                                                 "aten::_log_softmax_backward_data"};

bool miscounts_dims(const Batch& batch) {
  const std::string& op = batch.signature().op->name;
  return std::find(std::begin(kMiscountScalars), std::end(kMiscountScalars), op) !=
             std::end(kMiscountScalars) &&
         batch.operand_value(0, 0).geometry->dim() == 0;
}

class FunctorchRule final : public Rule {
 public:
  // `loop` runs batches that functorch cannot run. It has the same result dependency.
  explicit FunctorchRule(const LoopRule& loop) : loop_(loop) {}

  std::string_view kind() const override { return "functorch"; }
  bool infers() const override { return true; }
  bool below_autograd() const override { return false; }
  bool capture(NodeBuilder& builder) const override { return capture_everything(builder); }

  void forward(Batch& batch) const override {
    if (batch.size() == 1 || !is_trusted(batch, *batch.record().signature) || !try_batched(batch)) {
      loop_.forward(batch);
      batch.record().rule = &loop_;
    }
  }

  ResultDependency result_dependency() const override { return loop_.result_dependency(); }
  at::Tensor replay_chain(at::ArrayRef<at::Tensor> operands, const at::Tensor& c) const override {
    return loop_.replay_chain(operands, c);
  }

  void backward_chain(BackwardBatch& batch) const override {
    const LocalGraph graph = graph_of(batch);
    batch.add_to_result(
        result_dependency().from,
        chain_gradient(graph, result_dependency(), batch.grad_stacked(result_dependency().result)));
  }

  void backward(BackwardBatch& batch) const override {
    if (batch.record().local.empty()) return loop_.backward(batch);
    if (!is_custom_function(*batch.signature().op)) return backward_batched(batch);
    // Members are grouped by the set of results that gradients have reached.
    std::map<uint8_t, std::vector<NodeId>> alike;
    for (int64_t m = 0; m < batch.size(); ++m) alike[batch.reached(m)].push_back(batch.member(m));
    for (const auto& [reached, members] : alike) {
      BackwardBatch part = batch.part(members);
      try {
        backward_batched(part);
      } catch (const std::exception& error) {
        if (host_interrupts(error)) throw;
        loop_.backward_again(part);  // its backward can't be batched, or raises an error
      }
    }
  }

 private:
  void backward_batched(BackwardBatch& batch) const {
    const LocalGraph graph = graph_of(batch);
    std::vector<at::Tensor> gradients;
    for (size_t k = 0; k < graph.outputs.size(); ++k) {
      gradients.push_back(has_gradient(batch, 0, k) ? batch.grad_stacked(k) : at::Tensor());
    }
    const std::vector<at::Tensor> grads = differentiate(
        graph, std::move(gradients), batch.chained() ? result_dependency().from : kNone);
    for (size_t s = 0; s < grads.size(); ++s) {
      if (!grads[s].defined() || !batch.needs(s)) continue;
      if (graph.shared[s] != 0) {
        batch.add_single(s, grads[s]);
      } else {
        batch.add(s, grads[s]);
      }
    }
  }

  // Returns what forward kept, or recomputes it for the members that were reached.
  static LocalGraph graph_of(BackwardBatch& batch) {
    const LocalGraph& kept = batch.record().local.front();
    // Rows without a gradient must not take part: 0 * NaN is NaN.
    if (batch.complete() && !is_divided(kept, batch)) return kept;
    batch.check_unwritten();
    const ContextGuard context(batch.signature().context);
    return call_batched(batch, true);
  }

  // Whether an operand that forward passed once for all members has gradients that go to different
  // places.
  static bool is_divided(const LocalGraph& graph, BackwardBatch& batch) {
    for (size_t s = 0; s < graph.shared.size(); ++s) {
      if (batch.given(s) && graph.shared[s] != 0 && !is_broadcast(batch, s)) return true;
    }
    return false;
  }

  // Whether the batching rule is right for this batch. If not, notes the reason in the signature.
  bool is_trusted(const Batch& batch, Signature& signature) const {
    if (!miscounts_dims(batch)) return true;
    signature.note = "functorch takes the batch for a dimension of what has none";
    signature.rule = &loop_;
    return false;
  }

  // Runs the batch by functorch. Returns false, and notes the reason in the signature, if functorch
  // has no rule or gives another shape or dtype than eager.
  bool try_batched(Batch& batch) const {
    Signature& signature = *batch.record().signature;
    LocalGraph graph;
    try {
      graph = call_batched(batch, batch.needs_grad());
    } catch (const c10::Error& error) {
      signature.note =
          std::string("functorch: ") + std::string(error.what_without_backtrace()).substr(0, 80);
      signature.rule = &loop_;
      return false;
    }
    for (size_t k = 0; k < graph.outputs.size(); ++k) {
      if (matches(graph.outputs[k], batch.result_value(0, k), batch.size())) continue;
      signature.note = "functorch gives another shape or dtype than eager";
      signature.rule = &loop_;
      return false;
    }
    for (size_t k = 0; k < graph.outputs.size(); ++k) {
      batch.output_stacked(k).copy_(graph.outputs[k].detach());
    }
    if (batch.needs_grad()) batch.record().local.push_back(std::move(graph));
    return true;
  }

  const LoopRule& loop_;
};

const LoopRule& plain_loop() {
  static const LoopRule rule;
  return rule;
}

}  // namespace

LocalGraph call_single(const BatchView& batch, int64_t m, bool record) {
  const at::AutoGradMode grad_mode(record);
  LocalGraph graph;
  const Node& node = batch.node(m);
  for (size_t s = 0; s < node.num_operands; ++s) {
    const ValueId id = batch.operand(m, s);
    graph.inputs.push_back(id == kNone ? at::Tensor()
                                       : leaf(region_view(batch.region(m, id)),
                                              record && batch.tape().values[id].requires_grad));
  }
  std::vector<at::Tensor> places;
  for (uint32_t k = 0; k < node.num_values; ++k) {
    places.push_back(region_view(batch.result_region(m, k)));
  }
  graph.outputs = batch.signature().rule->eager(batch.signature(), graph.inputs, places);
  return graph;
}

std::vector<at::Tensor> Rule::eager(const Signature& signature, at::ArrayRef<at::Tensor> operands,
                                    at::ArrayRef<at::Tensor>) const {
  Stack stack = rebuild(signature, operands);
  signature.op->handle.callBoxed(stack);
  return results_of(stack);
}

std::vector<at::Tensor> Rule::replay(const Signature& signature, at::ArrayRef<at::Tensor> operands,
                                     at::ArrayRef<at::Tensor> computed) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !signature.op->random, "torch_autobatch: backward with create_graph=True through ",
      signature.op->name,
      " in a batch() block: its random numbers were not kept. Run it outside batch().");
  return eager(signature, operands, computed);
}

RuleTable generic_rules() {
  static const DifferentiatedLoopRule differentiated_loop;
  static const KernelCellRule kernel_cell;
  return {
      {"aten::lstm_cell", &kernel_cell},
      // functorch's gradient differs from eager's if there are zeros (prod) or infinite logits.
      {"aten::prod", &differentiated_loop},
      {"aten::prod.dim_int", &differentiated_loop},
      {"aten::binary_cross_entropy_with_logits", &loop_rule()},
      // functorch treats mean and rstd as independent inputs. In eager, the gradient of the input
      // includes theirs.
      {"aten::native_layer_norm_backward", &differentiated_loop},
      {"aten::native_group_norm_backward", &differentiated_loop},
      {"aten::native_batch_norm_backward", &differentiated_loop},
      // functorch applies padding_idx in the first instance only.
      {"aten::embedding", &loop_rule()},
      // functorch treats all instances as one.
      {"aten::_is_all_true", &loop_rule()},
      {"aten::_is_any_true", &loop_rule()},
      // functorch computes the steps from infinite endpoints in another way.
      {"aten::linspace.Tensor_Tensor", &loop_rule()},
      {"aten::linspace.Tensor_Scalar", &loop_rule()},
      {"aten::linspace.Scalar_Tensor", &loop_rule()},
      // Random ops whose gradient does not depend on the drawn numbers: backward need not draw
      // again.
      {"aten::bernoulli", &functorch_rule()},
      {"aten::bernoulli.p", &functorch_rule()},
      {"aten::multinomial", &functorch_rule()},
      {"aten::normal.Tensor_float", &functorch_rule()},
      {"aten::normal.float_Tensor", &functorch_rule()},
      {"aten::normal.Tensor_Tensor", &functorch_rule()},
      // functorch's gradient of `src` is the right one times the width of `src` (PyTorch 2.13).
      {"aten::select_scatter", &loop_rule()},
  };
}

const Rule& functorch_rule() {
  static const FunctorchRule rule(plain_loop());
  return rule;
}

const Rule& loop_rule() { return plain_loop(); }

const Rule& generic_rule(const OpInfo& op, bool random) {
  static const LoopRule dependent_loop(Rule::ResultDependency{0, 1});
  static const FunctorchRule chained(dependent_loop);
  if (random) return loop_rule();
  return op.name == "aten::lstm_cell" ? chained : functorch_rule();
}

}  // namespace autobatch

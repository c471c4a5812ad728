// The rule "functorch". A batch runs as one call on the stacked operands, under functorch's
// batching rules. A local autograd graph on detached operands computes the gradients.
#include "autobatch/common/host_hooks.h"
#include "autobatch/rules/loop.h"

#include <ATen/functorch/BatchedFallback.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <map>

namespace autobatch {
namespace {

using torch::jit::Stack;

// Disables the warning that functorch prints if it runs an op as a loop.
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
  // Returns the values of all members, [n, *sizes]. A result that is equal for all members is
  // expanded.
  at::Tensor unwrap(const at::Tensor& t, int64_t n) const {
    auto* batched = at::functorch::maybeGetBatchedImpl(t);
    if (batched == nullptr || batched->level() != level_) {
      return t.expand(stacked_sizes(n, t.sizes()));
    }
    return batched->value().movedim(batched->bdim(), 0);
  }

 private:
  int64_t level_;
};

// Whether the op's batching rule is wrong if operand 0 is not batched. In PyTorch 2.13, such a call
// fills a shared tensor with the value of one instance.
bool stacks_first(const OpInfo& op) { return op.name == "aten::index_fill.int_Tensor"; }

// Whether the batched call takes the operand unstacked. Operands of random ops are stacked even if
// all members have the same operand, because each member needs its own random numbers.
bool is_broadcast(BatchView& batch, size_t slot) {
  const OpInfo& op = *batch.signature().op;
  return !op.random && batch.shared(slot) && !(slot == 0 && stacks_first(op));
}

// Returns the operand, stacked or unchanged. An operand that aliases the memory of a graph input
// gets the version counter of the graph input. Autograd can then detect writes to any tensor that
// functorch's call saves. The call may save other tensors than eager's call.
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

// Runs one call for all members. Returns the autograd graph of the call, with stacked results.
LocalGraph call_batched(BatchView& batch, bool needs_grad) {
  const at::AutoGradMode grad_mode(needs_grad);
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
    for (int64_t m = 0; needs_grad && m < n && !needs; ++m)
      needs = batch.operand_value(m, s).requires_grad;
    graph.shared.push_back(is_broadcast(batch, s) ? 1 : 0);
    any_stacked = any_stacked || graph.shared.back() == 0;
    graph.inputs.push_back(input_of(batch, s, graph.shared.back() == 0, needs));
  }
  const Signature& signature = batch.signature();
  if (!any_stacked) {  // all members compute the same result
    Stack stack = rebuild(signature, graph.inputs);
    signature.op->handle.callBoxed(stack);
    for (const at::Tensor& out : results_of(stack)) {
      graph.outputs.push_back(out.expand(stacked_sizes(n, out.sizes())));
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

bool matches(const at::Tensor& out, const Value& value, int64_t n) {
  return out.defined() && out.scalar_type() == value.dtype && out.size(0) == n &&
         out.sizes().slice(1) == at::IntArrayRef(value.geometry->sizes);
}

// If an operand has no dimensions, the batching rules of these ops treat the batch dimension as
// dimension 0. All ops of ATen with dimension arguments were examined in PyTorch 2.13.
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
  // `loop` runs batches that functorch cannot run. Both rules must have the same result dependency.
  explicit FunctorchRule(const LoopRule& loop) : loop_(loop) {}

  std::string_view report_name() const override { return "functorch"; }
  bool infers() const override { return true; }
  bool below_autograd() const override { return false; }
  bool capture(NodeBuilder& builder) const override { return capture_all_arguments(builder); }

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
        loop_.backward_again(part);  // the batched backward has failed
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

  // Returns the graph that forward kept, or a new graph for the members that a gradient has
  // reached.
  static LocalGraph graph_of(BackwardBatch& batch) {
    const LocalGraph& kept = batch.record().local.front();
    // Members without a gradient must be omitted, because 0 * NaN is NaN.
    if (batch.complete() && !is_divided(kept, batch)) return kept;
    batch.check_unwritten();
    const ContextGuard context(batch.signature().context);
    return call_batched(batch, true);
  }

  // Whether forward passed an operand once for all members although the members' gradients of this
  // operand must be added to different regions.
  static bool is_divided(const LocalGraph& graph, BackwardBatch& batch) {
    for (size_t s = 0; s < graph.shared.size(); ++s) {
      if (batch.given(s) && graph.shared[s] != 0 && !is_broadcast(batch, s)) return true;
    }
    return false;
  }

  // Whether functorch's batching rule is correct for this batch. If it is not, stores the reason in
  // the signature.
  bool is_trusted(const Batch& batch, Signature& signature) const {
    if (!miscounts_dims(batch)) return true;
    signature.note =
        "the operand has no dimensions, and functorch's rule would treat the batch dimension as "
        "dimension 0";
    signature.rule = &loop_;
    return false;
  }

  // Runs the batch with functorch. Fails if functorch has no rule for the op, or if a result has
  // another shape or dtype than in eager. On failure, stores the reason in the signature and
  // returns false.
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
      signature.note = "the result of functorch's rule differs from eager mode in shape or dtype";
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

}  // namespace

const Rule& functorch_rule() {
  static const FunctorchRule rule(plain_loop());
  return rule;
}

const Rule& functorch_lstm_cell_rule() {
  static const LoopRule loop(Rule::ResultDependency{0, 1});
  static const FunctorchRule rule(loop);
  return rule;
}

}  // namespace autobatch

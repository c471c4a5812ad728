#include "autobatch/subgraph/compiled_subgraph.h"

#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/kernels/to_device.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <map>
#include <mutex>
#include <utility>

namespace autobatch {
namespace {

SubgraphCompiler& compiler() {
  static SubgraphCompiler set;
  return set;
}

// Returns a tensor with two copies of a single row, because compiled code requires at least two
// members.
at::Tensor doubled(const at::Tensor& stacked) { return at::cat({stacked, stacked}); }

class CompiledSubgraphRule final : public Rule {
 public:
  explicit CompiledSubgraphRule(std::shared_ptr<const Rule> plain)
      : plain_(std::move(plain)), subgraph_(*plain_->subgraph()) {}

  bool capture(NodeBuilder&) const override { return false; }

  void forward(Batch& batch) const override {
    if (batch.size() > 1 && run(batch)) return;
    batch.record().rule = plain_.get();
    plain_->forward(batch);
  }

  void backward(BackwardBatch& batch) const override {
    if (batch.record().kept == nullptr) raise_consumed("a cell");
    std::map<uint8_t, std::vector<NodeId>> groups;
    for (int64_t m = 0; m < batch.size(); ++m) {
      groups[closure_of(subgraph_, batch.reached(m))].push_back(batch.member(m));
    }
    if (groups.size() == 1) return differentiate(batch, groups.begin()->first);
    for (const auto& [reached, members] : groups) {
      BackwardBatch part = batch.part(members);
      differentiate(part, reached);
    }
  }

  std::vector<at::Tensor> eager(const Signature& signature, at::ArrayRef<at::Tensor> operands,
                                at::ArrayRef<at::Tensor> places) const override {
    return plain_->eager(signature, operands, places);
  }

  bool heavy() const override { return plain_->heavy(); }
  bool below_autograd() const override { return false; }
  bool saves() const override { return plain_->saves(); }
  bool reads(size_t slot) const override { return plain_->reads(slot); }
  bool reads_result(uint32_t k) const override { return plain_->reads_result(k); }
  bool depends(uint32_t k, size_t slot) const override { return plain_->depends(k, slot); }
  const Subgraph* subgraph() const override { return &subgraph_; }

 private:
  // The data of a batch that backward needs.
  struct Run {
    std::shared_ptr<CompiledSubgraph> code;
    CompiledSubgraph::Saved saved;
  };

  // Runs the compiled code. Returns false if there is no compiled code for this batch.
  bool run(Batch& batch) const {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failed_) return false;
    }
    std::vector<at::Tensor> operands;
    for (size_t i = 0; i < subgraph_.is_weight.size(); ++i) operands.push_back(operand(batch, i));
    const std::shared_ptr<CompiledSubgraph> code = find_code(operands);
    if (code == nullptr || !code->runs(batch.size())) return false;
    auto run = std::make_shared<Run>();
    run->code = code;
    const std::vector<at::Tensor> results = code->forward(operands, run->saved);
    const at::NoGradGuard no_grad;
    for (size_t k = 0; k < results.size(); ++k) batch.output_stacked(k).copy_(results[k]);
    if (batch.needs_grad()) batch.record().kept = std::move(run);
    std::string& note = batch.record().signature->note;
    if (note.find("compiled") == std::string::npos) note += ", compiled";
    return true;
  }

  at::Tensor operand(Batch& batch, size_t i) const {
    if (subgraph_.is_weight[i]) return batch.single(i);
    at::Tensor stacked = batch.stacked(i).contiguous();
    // Compiled code may save an operand that eager mode does not save. In eager mode, a later write
    // to this operand is not an error. So the compiled code gets a copy of the operand.
    const Value& value = batch.operand_value(0, i);
    const Value& base = batch.tape().values[value.base];
    const bool may_change = base.is_graph_input() && !subgraph_.operand_saved[i] &&
                            stacked.is_alias_of(batch.tape().graph_inputs[base.index].data);
    return may_change ? stacked.clone() : stacked;
  }

  // Compiles the subgraph at the first use. `mutex_` is not held during compilation, because the
  // compiler takes a lock of the host (Python's GIL). If two threads call this function at the same
  // time, both may compile.
  std::shared_ptr<CompiledSubgraph> find_code(at::ArrayRef<at::Tensor> operands) const {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (code_ != nullptr || failed_) return code_;
    }
    std::shared_ptr<CompiledSubgraph> made;
    if (compiler()) made = compiler()(plain_, operands);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (code_ == nullptr) code_ = std::move(made);
    failed_ = code_ == nullptr;
    return code_;
  }

  // Runs the backward of members whose gradients have reached the same results. Bit k of `reached`
  // is set if result k is one of these results.
  void differentiate(BackwardBatch& batch, uint8_t reached) const {
    const auto& run = *static_cast<const Run*>(batch.record().kept.get());
    const bool alone = batch.size() == 1;
    std::vector<at::Tensor> gradients;
    for (size_t k = 0; k < subgraph_.results.size(); ++k) {
      if ((reached >> k & 1) == 0) continue;
      const at::Tensor gradient = batch.grad_stacked(k);
      gradients.push_back(alone ? doubled(gradient) : gradient.contiguous());
    }
    const auto found = run.code->backward(reached, saved_of(run.saved, batch), gradients);
    gradients.clear();
    for (CompiledSubgraph::Gradient gradient : found) add(batch, std::move(gradient));
  }

  // Returns the saved rows of the members of `batch`.
  static CompiledSubgraph::Saved saved_of(const CompiledSubgraph::Saved& all,
                                          BackwardBatch& batch) {
    if (batch.complete() && batch.size() > 1) return all;
    std::vector<int64_t> rows = batch.positions();
    if (rows.size() == 1) rows.push_back(rows[0]);
    const at::Tensor index = at::tensor(rows);
    CompiledSubgraph::Saved out = all;
    for (size_t i = 0; i < out.tensors.size(); ++i) {
      at::Tensor& t = out.tensors[i];
      if (out.stacked[i]) t = t.index_select(0, to_device(index, t.device()));
    }
    return out;
  }

  // Adds a gradient to the gradient of an operand. If the batch has a single member, the member's
  // row was doubled. In this case only the gradients of the first copy are added, and sums over
  // both copies are halved.
  static void add(BackwardBatch& batch, CompiledSubgraph::Gradient gradient) {
    using Kind = CompiledSubgraph::Gradient::Kind;
    if (!batch.needs(gradient.slot)) return;
    auto& [kind, slot, left, right, skip] = gradient;
    if (batch.size() == 1) {
      const auto half = [](at::Tensor& t) {
        if (t.defined()) t = t.narrow(0, 0, t.size(0) / 2);
      };
      if (kind == Kind::kWhole) {
        left = left * 0.5;
      } else {
        half(left), half(right);
      }
    }
    switch (kind) {
      case Kind::kStacked:
        return batch.add(slot, std::move(left));
      case Kind::kWhole:
        return batch.add_single(slot, left);
      case Kind::kProduct:
        return batch.add_product(slot, left, right);
      case Kind::kRows:
        return batch.add_rows(slot, right, left, skip);
    }
  }

  std::shared_ptr<const Rule> plain_;
  const Subgraph& subgraph_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<CompiledSubgraph> code_;
  mutable bool failed_ = false;
};

}  // namespace

void set_subgraph_compiler(SubgraphCompiler set) { compiler() = std::move(set); }

uint8_t closure_of(const Subgraph& subgraph, uint8_t reached) {
  uint8_t out = reached;
  for (size_t k = 0; k < subgraph.closure.size(); ++k) {
    if ((reached >> k & 1) != 0) out |= subgraph.closure[k];
  }
  return out;
}

std::shared_ptr<const Rule> make_compiled_subgraph_rule(Subgraph subgraph) {
  auto plain = make_subgraph_rule(std::move(subgraph));
  bool any_gradient = false;
  for (const ValueId id : plain->subgraph()->results) {
    any_gradient |= plain->subgraph()->tape.values[id].requires_grad;
  }
  // If eager mode saves no tensors, the user may run backward any number of times. Compiled code
  // always saves tensors, so it can't be used in this case.
  if (any_gradient && !plain->saves()) return plain;
  return std::make_shared<CompiledSubgraphRule>(std::move(plain));
}

}  // namespace autobatch

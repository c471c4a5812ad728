// The rule "loop". It runs a batch as one call per member. A local autograd graph computes the
// gradients.
#pragma once

#include "autobatch/rules/generic.h"

namespace autobatch {

class LoopRule : public Rule {
 public:
  explicit LoopRule(ResultDependency dependency = {}) : dependency_(dependency) {}

  std::string_view report_name() const override { return "loop"; }
  bool infers() const override { return true; }
  bool below_autograd() const override { return false; }
  bool capture(NodeBuilder& builder) const override { return capture_all_arguments(builder); }
  void forward(Batch& batch) const override;
  void backward(BackwardBatch& batch) const override;

  ResultDependency result_dependency() const override { return dependency_; }
  void backward_chain(BackwardBatch& batch) const override;
  at::Tensor replay_chain(at::ArrayRef<at::Tensor> operands, const at::Tensor& c) const override;

  // Runs backward member by member. Used for a batch that forward ran as one call.
  void backward_again(BackwardBatch& batch) const;

 private:
  void backward_of(BackwardBatch& batch, int64_t m, const LocalGraph& graph) const;

  ResultDependency dependency_;
};

// Returns the same object as loop_rule(), as a LoopRule.
const LoopRule& plain_loop();

// Whether to pass a gradient for result k of member m to autograd. A custom autograd.Function can
// distinguish a missing gradient from zeros. For all other ops, a missing gradient is passed as
// zeros.
bool has_gradient(const BackwardBatch& batch, int64_t m, size_t k);

}  // namespace autobatch

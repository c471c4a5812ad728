// Random ops. One call draws the random numbers of the whole batch. The distribution is the same as
// in eager, but an instance gets different random numbers.
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// The rule of dropout(x, p, train). The mask, scaled by 1 / (1 - p), is a hidden result.
class DropoutRule final : public Rule {
 public:
  bool reads(size_t) const override { return false; }
  bool reads_result(uint32_t k) const override { return k == 1; }

  bool capture(NodeBuilder& builder) const override {
    const double p = builder.argument(1).toDouble();
    if (p < 0 || p > 1) return false;
    if (p == 0 || !builder.argument(2).toBool()) {
      builder.return_argument(0);
      return true;
    }
    const Value x = builder.operand(0);
    if (!is_float(x) || !row_major(x) || x.geometry->numel == 0) return false;
    builder.key(dtype_word(x));
    builder.constant(1);
    builder.result(x.geometry->canonical, x.dtype);
    builder.hidden(x.geometry->sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const double keep = 1 - batch.argument(1).toDouble();
    Tensor mask = batch.output(1);
    if (keep > 0) {
      mask.bernoulli_(keep).div_(keep);
    } else {
      mask.zero_();
    }
    Tensor out = batch.output(0);
    at::mul_out(out, batch.flat(0), mask);
  }

  void backward(BackwardBatch& batch) const override {
    batch.add(0, batch.grad_flat(0) * batch.result_flat(1));
  }

  std::vector<Tensor> replay(const Signature&, at::ArrayRef<Tensor> operands,
                             at::ArrayRef<Tensor> computed) const override {
    return {operands[0] * computed[1]};
  }
};

// The rule of calls of alpha_dropout and feature_alpha_dropout that drop nothing. These calls
// return their argument. A generic rule captures all other calls.
class NoDropoutRule final : public Rule {
 public:
  bool capture(NodeBuilder& builder) const override {
    const double p = builder.argument(1).toDouble();
    const bool none = p == 0 || !builder.argument(2).toBool() || builder.tensor(0).numel() == 0;
    if (p < 0 || p > 1 || !none) return false;
    builder.return_argument(0);
    return true;
  }
  void forward(Batch&) const override {}
  void backward(BackwardBatch&) const override {}
};

}  // namespace

RuleTable random_rules() {
  return {{"aten::dropout", new DropoutRule()},
          {"aten::alpha_dropout", new NoDropoutRule()},
          {"aten::feature_alpha_dropout", new NoDropoutRule()}};
}

}  // namespace autobatch

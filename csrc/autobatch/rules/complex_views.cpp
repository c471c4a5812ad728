// The results are copies of the bits, because a value that is a view has the dtype of its base.
// Writes that would show the difference are rejected (deferred_writes.h).
#include "autobatch/rules/complex_views.h"

#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <atomic>

namespace autobatch {
namespace {

using at::Tensor;

std::atomic<bool> used = false;

// view_as_complex(x [..., 2]) -> [...], or view_as_real(x [...]) -> [..., 2]
class ComplexViewRule final : public Rule {
 public:
  explicit ComplexViewRule(bool to_complex) : to_complex_(to_complex) {}

  bool saves() const override { return false; }
  bool reads(size_t) const override { return false; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0)) return false;
    const Value x = builder.operand(0);
    at::DimVector sizes(x.geometry->sizes);
    if (!row_major(x) || x.geometry->numel == 0) return false;
    if (to_complex_) {
      if (x.dtype != at::kFloat && x.dtype != at::kDouble) return false;
      if (sizes.empty() || sizes.back() != 2) return false;
      sizes.pop_back();
      builder.result(sizes, c10::toComplexType(x.dtype));
    } else {
      if (x.dtype != at::kComplexFloat && x.dtype != at::kComplexDouble) return false;
      sizes.push_back(2);
      builder.result(sizes, c10::toRealValueType(x.dtype));
    }
    builder.key(dtype_word(x));
    used = true;
    return true;
  }

  void forward(Batch& batch) const override { copy(batch.flat(0), batch.output(0)); }

  void backward(BackwardBatch& batch) const override {
    const Tensor g = batch.grad_flat(0);
    batch.add(0, to_complex_ ? at::view_as_real(g) : at::view_as_complex(g.view({-1, 2})));
  }

 private:
  void copy(const Tensor& from, const Tensor& to) const {
    to_complex_ ? at::view_as_real(to).view({-1}).copy_(from)
                : to.view({-1, 2}).copy_(at::view_as_real(from));
  }

  bool to_complex_;
};

}  // namespace

bool is_complex_view(const OpInfo& op) {
  return op.name == "aten::view_as_complex" || op.name == "aten::view_as_real";
}
bool are_complex_views_used() { return used; }

RuleTable complex_view_rules() {
  return {{"aten::view_as_complex", new ComplexViewRule(true)},
          {"aten::view_as_real", new ComplexViewRule(false)}};
}

}  // namespace autobatch

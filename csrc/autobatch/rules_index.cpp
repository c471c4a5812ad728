// Lookups by index. Indices are data: they never split a batch.
#include "autobatch/rules.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// embedding(weight [V, D], indices [..], padding_idx, scale_grad_by_freq, sparse) -> [.., D]
class EmbeddingRule final : public Rule {
 public:
  bool reads(size_t slot) const override { return slot != 0; }

  bool capture(Draft& draft) const override {
    if (draft.argument(3).toBool() || draft.argument(4).toBool()) return false;
    if (!draft.is_tensor(0) || !draft.is_tensor(1) || draft.is_computed(0)) return false;
    const Value w = draft.weight(0);
    const Value indices = draft.operand(1);
    if (w.geometry->dim() != 2 || !w.geometry->contiguous || w.geometry->numel == 0) return false;
    if (indices.dtype != at::kLong && indices.dtype != at::kInt) return false;
    if (!draft.constant(2)) return false;
    draft.key(dtype_word(w));
    draft.key(dtype_word(indices));
    at::DimVector sizes(indices.geometry->sizes.begin(), indices.geometry->sizes.end());
    sizes.push_back(w.geometry->sizes[1]);
    draft.result(sizes, w.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Tensor w = batch.single(0);
    Tensor out = batch.output_rows(0, w.size(1));
    at::index_select_out(out, w, 0, batch.flat(1));
  }

  void backward(BackwardBatch& batch) const override {
    const Value& w = batch.operand_value(0, 0);
    batch.add_rows(0, batch.flat(1), batch.grad_rows(0, w.geometry->sizes[1]),
                   batch.argument(2).toInt());
  }
};

}  // namespace

RuleTable index_rules() { return {{"aten::embedding", new EmbeddingRule()}}; }

}  // namespace autobatch

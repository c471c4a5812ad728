// Classification losses of logits (or log-probabilities) [N, C] or [C], N differing freely.
#include "autobatch/rules.h"

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

namespace autobatch {
namespace {

using at::Tensor;

// cross_entropy_loss(x, target, weight?, reduction, ignore_index, label_smoothing)
// nll_loss_nd(x, target, weight?, reduction, ignore_index), x being log-probabilities
struct Loss {
  const char* op;
  bool log_softmax;  // of x first; kept as a hidden result
};

const Loss kLosses[] = {
    {"aten::cross_entropy_loss", true},
    {"aten::nll_loss_nd", false},
    {"aten::nll_loss", false},
};

class LossRule final : public Rule {
 public:
  explicit LossRule(const Loss& entry) : entry_(entry) {}

  bool capture(Draft& draft) const override {
    if (!draft.is_tensor(0) || !draft.is_tensor(1)) return false;
    if (entry_.log_softmax && draft.argument(5).toDouble() != 0) return false;
    const Value x = draft.operand(0);
    const Value target = draft.operand(1);
    const auto& sizes = x.geometry->sizes;
    const auto& labels = target.geometry->sizes;
    if (!is_float(x) || !row_major(x) || x.geometry->numel == 0) return false;
    if (target.dtype != at::kLong || target.requires_grad) return false;
    const bool rows = sizes.size() == 2 && labels.size() == 1 && labels[0] == sizes[0];
    if (!rows && !(sizes.size() == 1 && labels.empty())) return false;
    if (!capture_weight(draft, sizes.back(), x)) return false;
    if (!draft.constant(3) || !draft.constant(4)) return false;
    draft.key(dtype_word(x));
    draft.key(static_cast<uint64_t>(sizes.back()));
    if (draft.argument(3).toInt() == at::Reduction::None) {
      draft.result(labels, x.dtype);
    } else {
      draft.result(at::IntArrayRef(), x.dtype);
    }
    if (entry_.log_softmax) draft.hidden(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t classes = num_classes(batch);
    Tensor log_probs = batch.rows(0, classes);
    if (entry_.log_softmax) {
      Tensor out = batch.output_rows(1, classes);
      at::_log_softmax_out(out, log_probs, 1, false);
      log_probs = out;
    }
    const Tensor labels = batch.flat(1);
    const Tensor losses = std::get<0>(at::nll_loss_forward(log_probs, labels, class_weight(batch),
                                                           at::Reduction::None, ignored(batch)));
    Tensor out = batch.output(0);
    const std::vector<int64_t> counts = rows_of(batch);
    if (reduction(batch) == at::Reduction::None) {
      out.copy_(losses);
      return;
    }
    Tensor sums = out.unsqueeze(1);
    segment_sum(losses.unsqueeze(1), counts, sums);
    if (reduction(batch) == at::Reduction::Mean) out.div_(denominators(batch, labels, counts));
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t classes = num_classes(batch);
    const Tensor labels = batch.flat(1);
    const std::vector<int64_t> counts = rows_of(batch);
    Tensor g = batch.grad_flat(0);
    if (reduction(batch) == at::Reduction::Mean) g = g / denominators(batch, labels, counts);
    if (reduction(batch) != at::Reduction::None) {
      g = repeat_rows(g.unsqueeze(1), counts).squeeze(1);
    }
    const Tensor log_probs =
        entry_.log_softmax ? batch.result_rows(1, classes) : batch.rows(0, classes);
    const Tensor unused = at::zeros({}, g.options());
    Tensor gx = at::nll_loss_backward(g.contiguous(), log_probs, labels, class_weight(batch),
                                      at::Reduction::None, ignored(batch), unused);
    if (entry_.log_softmax) {
      gx = at::_log_softmax_backward_data(gx, log_probs, 1, log_probs.scalar_type());
    }
    batch.add(0, gx);
  }

 private:
  static bool capture_weight(Draft& draft, int64_t classes, const Value& x) {
    if (!draft.is_tensor(2)) {
      draft.absent(2);
      return true;
    }
    if (draft.is_computed(2)) return false;
    const Value w = draft.weight(2);
    return w.geometry->dim() == 1 && w.geometry->sizes[0] == classes && w.dtype == x.dtype &&
           !w.requires_grad;
  }

  static int64_t num_classes(const BatchView& batch) {
    return batch.operand_value(0, 0).geometry->sizes.back();
  }
  static int64_t reduction(const BatchView& batch) { return batch.argument(3).toInt(); }
  static int64_t ignored(const BatchView& batch) { return batch.argument(4).toInt(); }
  static Tensor class_weight(BatchView& batch) {
    return batch.given(2) ? batch.single(2).contiguous() : Tensor();
  }

  static std::vector<int64_t> rows_of(const BatchView& batch) {
    std::vector<int64_t> counts;
    for (int64_t m = 0; m < batch.size(); ++m) {
      counts.push_back(batch.operand_value(m, 1).geometry->numel);
    }
    return counts;
  }

  // By instance: the weights of its labels summed, ignored ones left out; eager's 0 / 0 is NaN.
  static Tensor denominators(BatchView& batch, const Tensor& labels,
                             const std::vector<int64_t>& counts) {
    const Tensor w = class_weight(batch);
    const Tensor counted = labels.ne(ignored(batch));
    const at::ScalarType dtype = batch.operand_value(0, 0).dtype;
    Tensor each = counted.to(dtype);
    if (w.defined())
      each =
          at::where(counted, w.index_select(0, labels.masked_fill(counted.logical_not(), 0)), each);
    Tensor out = at::empty({batch.size(), 1}, each.options());
    segment_sum(each.unsqueeze(1), counts, out);
    return out.squeeze(1);
  }

  const Loss& entry_;
};

}  // namespace

RuleTable loss_rules() {
  RuleTable table;
  for (const Loss& entry : kLosses) table.push_back({entry.op, new LossRule(entry)});
  return table;
}

}  // namespace autobatch

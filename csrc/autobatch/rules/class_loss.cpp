// Classification losses of logits (or log-probabilities) [N, C] or [C], with any N per instance.
// Targets are labels or distributions. Label smoothing is supported.
#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

namespace autobatch {
namespace {

using at::Tensor;

// The op is one of
//   cross_entropy_loss(x, target, weight?, reduction, ignore_index, label_smoothing)
//   nll_loss_nd(x, target, weight?, reduction, ignore_index), where x is log-probabilities.
struct Loss {
  const char* op;
  bool log_softmax;  // whether the op applies log_softmax; its output is a hidden result
};

const Loss kLosses[] = {
    {"aten::cross_entropy_loss", true},
    {"aten::nll_loss_nd", false},
    {"aten::nll_loss", false},
};

at::IntArrayRef without_last(at::IntArrayRef sizes) { return sizes.slice(0, sizes.size() - 1); }

class LossRule final : public Rule {
 public:
  explicit LossRule(const Loss& entry) : entry_(entry) {}

  bool reads(size_t slot) const override { return slot != 0 || !entry_.log_softmax; }
  bool reads_result(uint32_t k) const override { return k != 0; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !builder.is_tensor(1)) return false;
    const Value x = builder.operand(0);
    const Value target = builder.operand(1);
    const auto& sizes = x.geometry->sizes;
    if (!is_float(x) || !row_major(x) || sizes.empty() || sizes.back() == 0) return false;
    if (sizes.size() > 2) return false;
    if (!takes(target, x)) return false;
    if (!capture_weight(builder, sizes.back(), x)) return false;
    for (size_t i = 3; i < builder.num_arguments(); ++i) {
      if (!builder.constant(i)) return false;
    }
    if (entry_.log_softmax) {
      const double smoothing = builder.argument(5).toDouble();
      if (smoothing < 0 || smoothing > 1) return false;  // eager raises the error
    }
    builder.key(dtype_word(x) << 8 | dtype_word(target));
    builder.key(static_cast<uint64_t>(sizes.back()));
    if (builder.argument(3).toInt() == at::Reduction::None) {
      builder.result(without_last(sizes), x.dtype);
    } else {
      builder.result(at::IntArrayRef(), x.dtype);
    }
    if (entry_.log_softmax) builder.hidden(sizes, x.dtype);
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
    const Tensor losses = row_losses(batch, log_probs);
    Tensor out = batch.output(0);
    if (reduction(batch) == at::Reduction::None) {
      out.copy_(losses);
      return;
    }
    const Counts counts = rows_of(batch);
    if (are_all_one(counts)) {
      out.copy_(losses);
    } else {
      Tensor sums = out.unsqueeze(1);
      segment_sum(losses.unsqueeze(1), counts, sums);
    }
    if (reduction(batch) != at::Reduction::Mean) return;
    const Tensor by = denominators(batch, counts);
    if (by.defined()) out.div_(by);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t classes = num_classes(batch);
    const Counts counts = rows_of(batch);
    Tensor g = batch.grad_flat(0);
    if (reduction(batch) == at::Reduction::Mean) {
      const Tensor by = denominators(batch, counts);
      if (by.defined()) g = g / by;
    }
    if (reduction(batch) != at::Reduction::None && !are_all_one(counts)) {
      g = repeat_rows(g.unsqueeze(1), counts).squeeze(1);
    }
    const Tensor log_probs =
        entry_.log_softmax ? batch.result_rows(1, classes) : batch.rows(0, classes);
    if (batch.needs(1)) add_target_gradient(batch, g, log_probs);
    if (!batch.needs(0)) return;
    Tensor gx = row_gradients(batch, g, log_probs);
    if (entry_.log_softmax) {
      gx = at::_log_softmax_backward_data(gx, log_probs, 1, log_probs.scalar_type());
    }
    batch.add(0, gx);
  }

 private:
  // Whether the target contains one label per row or one distribution per row.
  bool takes(const Value& target, const Value& x) const {
    const auto& sizes = x.geometry->sizes;
    const auto& labels = target.geometry->sizes;
    if (entry_.log_softmax && is_float(target)) {
      return target.dtype == x.dtype && labels == sizes && row_major(target);
    }
    return target.dtype == at::kLong && without_last(sizes) == at::IntArrayRef(labels);
  }

  static bool capture_weight(NodeBuilder& builder, int64_t classes, const Value& x) {
    if (!builder.is_tensor(2)) {
      builder.absent(2);
      return true;
    }
    if (builder.is_computed(2)) return false;
    const Value w = builder.weight(2);
    return w.geometry->dim() == 1 && w.geometry->sizes[0] == classes && w.dtype == x.dtype &&
           !w.requires_grad;
  }

  static int64_t num_classes(const BatchView& batch) {
    return batch.operand_value(0, 0).geometry->sizes.back();
  }
  static int64_t reduction(const BatchView& batch) { return batch.argument(3).toInt(); }
  static int64_t ignored(const BatchView& batch) { return batch.argument(4).toInt(); }
  double smoothing(const BatchView& batch) const {
    return entry_.log_softmax ? batch.argument(5).toDouble() : 0;
  }
  static Tensor class_weight(BatchView& batch) {
    return batch.given(2) ? batch.single(2).contiguous() : Tensor();
  }
  static bool has_distributions(const BatchView& batch) {
    return c10::isFloatingType(batch.operand_value(0, 1).dtype);
  }

  // For targets that are distributions, returns the weights of the log-probabilities in the loss:
  // [rows, C].
  Tensor coefficients(BatchView& batch) const {
    const int64_t classes = num_classes(batch);
    const double smooth = smoothing(batch);
    Tensor out = batch.rows(1, classes);
    if (smooth > 0) out = out * (1 - smooth) + smooth / static_cast<double>(classes);
    const Tensor w = class_weight(batch);
    return w.defined() ? out * w : out;
  }

  // Returns the weights of the log-probabilities in the smoothing term of the loss: [rows, 1], or
  // [rows, C] with class weights. Ignored rows have weight 0.
  Tensor uniform_part(BatchView& batch, const Tensor& labels) const {
    const Tensor w = class_weight(batch);
    const double each = smoothing(batch) / static_cast<double>(num_classes(batch));
    const auto dtype = batch.operand_value(0, 0).dtype;
    const Tensor counted = labels.ne(ignored(batch)).to(dtype).unsqueeze(1) * each;
    return w.defined() ? counted * w : counted;
  }

  // Returns the loss of each row, before the reduction.
  Tensor row_losses(BatchView& batch, const Tensor& log_probs) const {
    if (has_distributions(batch)) return (log_probs * coefficients(batch)).sum(1).neg_();
    const Tensor labels = batch.flat(1);
    const Tensor losses = std::get<0>(at::nll_loss_forward(log_probs, labels, class_weight(batch),
                                                           at::Reduction::None, ignored(batch)));
    const double smooth = smoothing(batch);
    if (smooth == 0) return losses;
    return losses * (1 - smooth) - (log_probs * uniform_part(batch, labels)).sum(1);
  }

  // Returns the gradient of the log-probabilities. `g` contains the gradient of each row's loss.
  Tensor row_gradients(BatchView& batch, const Tensor& g, const Tensor& log_probs) const {
    if (has_distributions(batch)) return coefficients(batch) * g.neg().unsqueeze(1);
    const Tensor labels = batch.flat(1);
    const double smooth = smoothing(batch);
    const Tensor unused = at::zeros({}, g.options());
    const Tensor row = smooth == 0 ? g.contiguous() : g * (1 - smooth);
    const Tensor gx = at::nll_loss_backward(row, log_probs, labels, class_weight(batch),
                                            at::Reduction::None, ignored(batch), unused);
    if (smooth == 0) return gx;
    // `g` is NaN for an instance whose labels are all ignored.
    const Tensor each = g.masked_fill(labels.eq(ignored(batch)), 0);
    return gx - each.unsqueeze(1) * uniform_part(batch, labels);
  }

  // Adds the gradient of the target distributions. The distributions may be computed values that
  // need a gradient.
  void add_target_gradient(BackwardBatch& batch, const Tensor& g, const Tensor& log_probs) const {
    const Tensor w = class_weight(batch);
    const Tensor each = log_probs * (g * (smoothing(batch) - 1)).unsqueeze(1);
    batch.add(1, w.defined() ? each * w : each);
  }

  static Counts rows_of(const BatchView& batch) {
    Counts counts;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const auto& sizes = batch.operand_value(m, 0).geometry->sizes;
      counts.push_back(sizes.size() == 1 ? 1 : sizes[0]);
    }
    return counts;
  }

  static bool are_all_one(const Counts& counts) {
    return std::ranges::all_of(counts, [](int64_t count) { return count == 1; });
  }

  // Whether each instance has one label and no label is ignored. To avoid slow reads, returns false
  // if the labels are not in host memory. Also returns false if there are class weights.
  static bool counts_every_label(BatchView& batch, const Counts& counts) {
    const Tensor labels = batch.flat(1);
    if (!has_host_memory(labels.device()) || batch.given(2) || !are_all_one(counts)) return false;
    const auto* first = labels.const_data_ptr<int64_t>();
    return std::none_of(first, first + labels.numel(),
                        [skip = ignored(batch)](int64_t label) { return label == skip; });
  }

  // Returns the denominator of the mean for each instance. For distributions, a denominator is the
  // number of rows. For labels, a denominator is the sum of the class weights of the labels that
  // are not ignored. If all labels are ignored, the mean is 0 / 0 = NaN, as in eager. Returns an
  // undefined tensor if all denominators are 1.
  static Tensor denominators(BatchView& batch, const Counts& counts) {
    const at::ScalarType dtype = batch.operand_value(0, 0).dtype;
    if (has_distributions(batch)) {
      return to_device(at::tensor(counts, at::kLong).to(dtype), batch.operand_value(0, 0).device);
    }
    if (counts_every_label(batch, counts)) return {};
    const Tensor w = class_weight(batch);
    const Tensor labels = batch.flat(1);
    const Tensor counted = labels.ne(ignored(batch));
    Tensor each = counted.to(dtype);
    if (w.defined()) {
      const Tensor some = labels.masked_fill(counted.logical_not(), 0);
      each = at::where(counted, w.index_select(0, some), each);
    }
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

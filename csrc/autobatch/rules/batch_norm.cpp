// batch_norm in training mode, for instances with any number of rows. Each instance has its own
// statistics.
#include "autobatch/kernels/segment_reduce.h"
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <optional>
#include <vector>

namespace autobatch {
namespace {

using at::Tensor;

// batch_norm(x [n, C], weight?, bias?, running_mean, running_var, training, momentum, eps, ...)
// without running statistics. Their updates are captured separately (running_statistics.h).
class BatchNormRule final : public Rule {
 public:
  bool reads(size_t slot) const override { return slot != kBias; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || builder.is_tensor(3) || builder.is_tensor(4)) return false;
    if (!builder.argument(5).toBool()) return false;
    const Value x = builder.operand(0);
    const auto& sizes = x.geometry->sizes;
    if (x.dtype != at::kFloat && x.dtype != at::kDouble) return false;
    if (sizes.size() != 2 || sizes[0] < 2 || sizes[1] == 0 || !row_major(x)) return false;
    for (const size_t slot : {kWeight, kBias}) {
      if (!builder.is_tensor(slot)) {
        builder.absent(slot);
        continue;
      }
      if (builder.is_computed(slot)) return false;
      const Value w = builder.weight(slot);
      if (w.dtype != x.dtype || w.geometry->sizes != std::vector<int64_t>{sizes[1]}) return false;
    }
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(sizes[1]));
    if (!builder.constant(kEps)) return false;
    builder.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    if (batch.size() == 1) return forward_of_one(batch);
    const Normal normal(batch);
    Tensor out = batch.output_rows(0, normal.width);
    if (!batch.given(kWeight)) {
      out.copy_(normal.rows);
    } else {
      at::mul_out(out, normal.rows, batch.single(kWeight));
    }
    if (batch.given(kBias)) out.add_(batch.single(kBias));
  }

  void backward(BackwardBatch& batch) const override {
    const Normal normal(batch);
    const Tensor g = batch.grad_rows(0, normal.width);
    if (batch.given(kWeight) && batch.needs(kWeight)) {
      batch.add_product(kWeight, g * normal.rows, Tensor());
    }
    if (batch.given(kBias) && batch.needs(kBias)) batch.add_product(kBias, g, Tensor());
    if (!batch.needs(0)) return;
    const Tensor h = batch.given(kWeight) ? g * batch.single(kWeight) : g;
    const Tensor along = normal.rows * normal.mean_of(h * normal.rows);
    batch.add(0, (h - normal.mean_of(h) - along) * normal.scale);
  }

 private:
  static constexpr size_t kWeight = 1, kBias = 2, kEps = 7;

  // Calls eager's own kernel, so the result has eager's rounding.
  static void forward_of_one(Batch& batch) {
    const int64_t width = batch.operand_value(0, 0).geometry->sizes[1];
    const auto optional = [&](size_t slot) {
      return batch.given(slot) ? std::optional(batch.single(slot)) : std::nullopt;
    };
    const auto [out, mean, scale] =
        at::native_batch_norm(batch.rows(0, width), optional(kWeight), optional(kBias), {}, {},
                              /*training=*/true, 0.0, batch.argument(kEps).toDouble());
    batch.output_rows(0, width).copy_(out);
  }

  // The members' rows, normalized to mean 0 and variance 1 within each member.
  struct Normal {
    explicit Normal(BatchView& batch) {
      width = batch.operand_value(0, 0).geometry->sizes[1];
      for (int64_t m = 0; m < batch.size(); ++m) {
        counts.push_back(batch.operand_value(m, 0).geometry->sizes[0]);
      }
      const Tensor x = batch.rows(0, width);
      lengths =
          to_device(at::tensor(counts, at::kLong).to(x.scalar_type()), x.device()).unsqueeze(1);
      const Tensor deviations = x - mean_of(x);
      const double eps = batch.argument(kEps).toDouble();
      scale = (mean_of(deviations.square()) + eps).rsqrt_();
      rows = deviations * scale;
    }
    // Returns for each row the mean over the rows of its member.
    Tensor mean_of(const Tensor& values) const {
      Tensor sums = at::empty({static_cast<int64_t>(counts.size()), width}, values.options());
      segment_sum(values, counts, sums);
      return repeat_rows(sums.div_(lengths), counts);
    }

    Counts counts;
    int64_t width = 1;
    Tensor lengths;  // by member: number of rows, [n, 1]
    Tensor rows;
    Tensor scale;  // by row: the factor that normalized the deviations
  };
};

}  // namespace

RuleTable batch_norm_rules() { return {{"aten::batch_norm", new BatchNormRule()}}; }

}  // namespace autobatch

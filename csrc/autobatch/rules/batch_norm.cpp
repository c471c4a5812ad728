// batch_norm for instances of any size. In training mode, each instance has its own statistics. In
// evaluation mode, all instances use the statistics of the module.
#include "autobatch/kernels/segment_reduce.h"
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/channel_vectors.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <optional>

namespace autobatch {
namespace {

using at::Tensor;

// The rule of batch_norm(x [n, C], weight?, bias?, running_mean, running_var, training, momentum,
// eps, ...) without running statistics. Updates of running statistics are captured separately
// (running_statistics.h).
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
      if (!capture_channel_vector(builder, slot, sizes[1], x)) return false;
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

  // Runs a batch of one member. Calls eager's own kernel, so the result has eager's rounding.
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
    // Returns, for each row of `values`, the mean over all rows of the same member.
    Tensor mean_of(const Tensor& values) const {
      Tensor sums = at::empty({static_cast<int64_t>(counts.size()), width}, values.options());
      segment_sum(values, counts, sums);
      return repeat_rows(sums.div_(lengths), counts);
    }

    Counts counts;
    int64_t width = 1;
    Tensor lengths;  // by member: number of rows, [n, 1]
    Tensor rows;
    Tensor scale;  // by row: the factor that normalizes the deviations
  };
};

// The elements of operand 0 of all members, and functions that expand a vector [C] to these
// elements. The operand is [N, C, ...]. N and the sizes after C may differ between members. The
// class also sums values by channel.
class Channels {
 public:
  explicit Channels(BatchView& batch) {
    const auto& sizes = batch.operand_value(0, 0).geometry->sizes;
    channels_ = sizes[1];
    if (sizes.size() == 2) {
      data_ = batch.rows(0, channels_);
    } else if (batch.uniform(0)) {
      data_ = batch.stacked(0).reshape({batch.size() * sizes[0], channels_, -1});
    } else {
      data_ = batch.flat(0);
      for (int64_t m = 0; m < batch.size(); ++m) {
        const Geometry& g = *batch.operand_value(m, 0).geometry;
        const int64_t blocks = g.sizes[0] * channels_;
        counts_.insert(counts_.end(), static_cast<size_t>(blocks), g.numel / blocks);
      }
    }
  }

  // The elements of operand 0 as [rows, C] or [N, C, elements], or as a 1-D tensor if the members
  // have different sizes.
  const Tensor& data() const { return data_; }

  // Expands a vector [C] so that it broadcasts to data().
  Tensor spread(const Tensor& vector) const {
    if (data_.dim() == 2) return vector;
    if (data_.dim() == 3) return vector.unsqueeze(1);
    const int64_t blocks = static_cast<int64_t>(counts_.size());
    return repeat_rows(vector.repeat({blocks / channels_}).unsqueeze(1), counts_).view(-1);
  }

  // Sums the values of each channel. `values` has the sizes of data(). Returns [C].
  Tensor sum(const Tensor& values) const {
    if (data_.dim() == 2) return values.sum(0);
    if (data_.dim() == 3) return values.sum(at::IntArrayRef{0, 2});
    Tensor sums = at::empty({static_cast<int64_t>(counts_.size()), 1}, values.options());
    segment_sum(values.unsqueeze(1), counts_, sums);
    return sums.view({-1, channels_}).sum(0);
  }

 private:
  int64_t channels_ = 1;
  Tensor data_;
  Counts counts_;  // by member, N and channel: number of elements; empty if sizes are equal
};

// The rule of batch_norm(x [N, C, ...], weight?, bias?, running_mean, running_var, training=False,
// ...). All instances use the same statistics. The op therefore multiplies all elements of a
// channel by one number, and adds another number to them.
class StoredStatisticsRule final : public Rule {
 public:
  bool reads(size_t slot) const override { return slot != kBias; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || builder.argument(kTraining).toBool()) return false;
    if (!builder.is_tensor(kMean) || !builder.is_tensor(kVariance)) return false;
    const Value x = builder.operand(0);
    const auto& sizes = x.geometry->sizes;
    if (x.dtype != at::kFloat && x.dtype != at::kDouble) return false;
    if (sizes.size() < 2 || x.geometry->numel == 0 || !row_major(x)) return false;
    if (builder.tensor(kMean).requires_grad() || builder.tensor(kVariance).requires_grad())
      return false;
    for (const size_t slot : {kWeight, kBias, kMean, kVariance}) {
      if (!capture_channel_vector(builder, slot, sizes[1], x)) return false;
    }
    builder.key(dtype_word(x));
    builder.key(sizes.size());
    builder.key(static_cast<uint64_t>(sizes[1]));
    if (!builder.constant(kTraining) || !builder.constant(kEps)) return false;
    builder.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Channels channels(batch);
    const Tensor scale = scale_of(batch);
    Tensor shift = -batch.single(kMean) * scale;
    if (batch.given(kBias)) shift += batch.single(kBias);
    Tensor out = batch.output(0).view(channels.data().sizes());
    at::addcmul_out(out, channels.spread(shift), channels.data(), channels.spread(scale));
  }

  void backward(BackwardBatch& batch) const override {
    const Channels channels(batch);
    const Tensor g = batch.grad_flat(0).view(channels.data().sizes());
    if (batch.given(kBias) && batch.needs(kBias)) batch.add_single(kBias, channels.sum(g));
    if (batch.given(kWeight) && batch.needs(kWeight)) {
      const Tensor deviations = channels.data() - channels.spread(batch.single(kMean));
      batch.add_single(kWeight, channels.sum(g * deviations) * inverse_deviation(batch));
    }
    if (batch.needs(0)) batch.add(0, g * channels.spread(scale_of(batch)));
  }

 private:
  static constexpr size_t kWeight = 1, kBias = 2, kMean = 3, kVariance = 4, kTraining = 5, kEps = 7;

  static Tensor inverse_deviation(BatchView& batch) {
    return (batch.single(kVariance) + batch.argument(kEps).toDouble()).rsqrt_();
  }
  static Tensor scale_of(BatchView& batch) {
    const Tensor inverse = inverse_deviation(batch);
    return batch.given(kWeight) ? inverse * batch.single(kWeight) : inverse;
  }
};

}  // namespace

RuleTable batch_norm_rules() {
  return {{"aten::batch_norm", new BatchNormRule()},
          {"aten::batch_norm", new StoredStatisticsRule()}};
}

}  // namespace autobatch

// Normalization of groups of channels with the statistics of each example. The ops are group_norm,
// instance_norm, and batch_norm of one example in training mode. Members of one size run as one
// call.
#include "autobatch/rules/by_shape.h"
#include "autobatch/rules/channel_vectors.h"

#include <ATen/ATen.h>

#include <array>
#include <optional>

namespace autobatch {
namespace {

using at::Tensor;

struct Norm {
  const char* op;
  int groups;                    // argument number, or -1 if each channel is a group
  size_t weight, bias, epsilon;  // argument numbers
  int mean = -1, variance = -1;  // argument numbers of the running statistics, or -1
  int from_input = -1;           // number of an argument that must be true, or -1
  bool only_one = false;         // whether the op supports only inputs with N = 1
};

constexpr Norm kNorms[] = {
    {"aten::group_norm", 1, 2, 3, 4},
    {"aten::instance_norm", -1, 1, 2, 7, 3, 4, 5},
    {"aten::batch_norm", -1, 1, 2, 7, 3, 4, 5, true},
};

// The op's operands are x [N, C, ...] and optionally the weight and the bias. The hidden results
// are the mean and the inverse deviation of each group, [N, groups].
class GroupNormRule final : public Rule {
 public:
  explicit GroupNormRule(const Norm& entry) : entry_(entry) {}

  bool reads(size_t slot) const override { return slot != kBias; }
  bool reads_result(uint32_t k) const override { return k != 0; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !uses_statistics_of_input(builder)) return false;
    const Value x = builder.operand(0);
    const auto& sizes = x.geometry->sizes;
    if (x.dtype != at::kFloat && x.dtype != at::kDouble) return false;
    if (sizes.size() < 2 || x.geometry->numel == 0 || !row_major(x)) return false;
    if (entry_.only_one && (sizes[0] != 1 || sizes.size() < 3)) return false;
    const int64_t channels = sizes[1];
    const int64_t groups =
        entry_.groups < 0 ? channels : builder.argument(static_cast<size_t>(entry_.groups)).toInt();
    if (groups <= 0 || channels % groups != 0) return false;
    if (x.geometry->numel / (sizes[0] * groups) < 2) return false;
    for (const size_t argument : {entry_.weight, entry_.bias}) {
      if (!capture_channel_vector(builder, argument, channels, x)) return false;
    }
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(sizes.size()) << 32 | static_cast<uint64_t>(groups));
    builder.key(static_cast<uint64_t>(channels));
    if (!builder.constant(entry_.epsilon)) return false;
    builder.result(sizes, x.dtype);
    builder.hidden({sizes[0], groups}, x.dtype);
    builder.hidden({sizes[0], groups}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    for (const Members& members : calls_of(batch)) {
      const Tensor x = input(batch, members);
      const auto [out, mean, scale] = at::native_group_norm(
          x, vector(batch, kWeight), vector(batch, kBias), x.size(0), x.size(1), x.size(2),
          groups_in(batch), batch.argument(entry_.epsilon).toDouble());
      put(batch, 0, members, out);
      put(batch, 1, members, mean);
      put(batch, 2, members, scale);
    }
  }

  void backward(BackwardBatch& batch) const override {
    const std::array<bool, 3> needs{batch.needs(0), batch.given(kWeight) && batch.needs(kWeight),
                                    batch.given(kBias) && batch.needs(kBias)};
    for (const Members& members : calls_of(batch)) {
      const Tensor x = input(batch, members);
      const Tensor g = members.empty() ? batch.grad_flat(0).view(x.sizes())
                                       : examples(gradients_of(batch, 0, members));
      const auto [gx, gw, gb] = at::native_group_norm_backward(
          g, x, statistics(batch, 1, members), statistics(batch, 2, members),
          vector(batch, kWeight), x.size(0), x.size(1), x.size(2), groups_in(batch), needs);
      if (needs[0] && members.empty()) batch.add(0, gx);
      if (needs[0] && !members.empty()) add_gradients(batch, 0, members, gx);
      if (needs[1]) batch.add_single(kWeight, gw);
      if (needs[2]) batch.add_single(kBias, gb);
    }
  }

 private:
  static constexpr size_t kWeight = 1, kBias = 2;  // operand numbers

  // Whether the call normalizes its input with the statistics of this input and has no running
  // statistics. (Updates of running statistics are captured separately, see running_statistics.h.)
  bool uses_statistics_of_input(const NodeBuilder& builder) const {
    for (const int argument : {entry_.mean, entry_.variance}) {
      if (argument >= 0 && builder.is_tensor(static_cast<size_t>(argument))) return false;
    }
    return entry_.from_input < 0 ||
           builder.argument(static_cast<size_t>(entry_.from_input)).toBool();
  }

  static int64_t num_elements(const Geometry& g) {
    return c10::multiply_integers(g.sizes.begin() + 2, g.sizes.end());
  }

  // Returns the members of each call. If an entry is an empty list, its call contains all members.
  // One call for all members is possible if all examples have the same number of elements per
  // channel.
  static std::vector<Members> calls_of(const BatchView& batch) {
    const int64_t first = num_elements(*batch.operand_value(0, 0).geometry);
    for (int64_t m = 1; m < batch.size(); ++m) {
      if (num_elements(*batch.operand_value(m, 0).geometry) != first) return groups_of(batch);
    }
    return {Members()};
  }

  // Returns the operands x of one call as [examples, C, elements].
  static Tensor input(BatchView& batch, const Members& members) {
    if (!members.empty()) return examples(stacked_of(batch, 0, members));
    const Geometry& g = *batch.operand_value(0, 0).geometry;
    return batch.flat(0).view({-1, g.sizes[1], num_elements(g)});
  }
  // Reshapes [n, N, C, ...] to [n N, C, elements].
  static Tensor examples(const Tensor& t) {
    const Tensor joined = t.flatten(0, 1);
    return (joined.dim() == 2 ? joined.unsqueeze(2) : joined.flatten(2)).contiguous();
  }

  static void put(Batch& batch, uint32_t k, const Members& members, const Tensor& values) {
    members.empty() ? (void)batch.output(k).copy_(values.view({-1}))
                    : put_results(batch, k, members, values);
  }
  static Tensor statistics(BackwardBatch& batch, uint32_t k, const Members& members) {
    const Tensor all = members.empty() ? batch.result_flat(k) : results_of(batch, k, members);
    return all.reshape({-1, groups_in(batch)}).contiguous();
  }

  static std::optional<Tensor> vector(BatchView& batch, size_t slot) {
    return batch.given(slot) ? std::optional(batch.single(slot).contiguous()) : std::nullopt;
  }

  static int64_t groups_in(const BatchView& batch) {
    return batch.result_value(0, 1).geometry->sizes[1];
  }

  const Norm& entry_;
};

}  // namespace

RuleTable group_norm_rules() {
  RuleTable table;
  for (const Norm& entry : kNorms) table.push_back({entry.op, new GroupNormRule(entry)});
  return table;
}

}  // namespace autobatch

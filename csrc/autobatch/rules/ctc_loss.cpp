// Runs ctc_loss as one call for each instance. The kernel spends its time in the recursion over the
// sequence, so one call for several instances would not be faster.
#include "autobatch/rules/loop.h"

#include <ATen/core/Reduction.h>

#include <algorithm>

namespace autobatch {
namespace {

// The rule of ctc_loss(log_probs [T, N, C] or [T, C], targets, input_lengths, target_lengths,
// blank, reduction, zero_infinity). The lengths are lists or tensors.
class CtcLossRule final : public LoopRule {
 public:
  bool infers() const override { return false; }

  void forward(Batch& batch) const override {
    batch.record().signature->note = "one call for several examples would not be faster";
    LoopRule::forward(batch);
  }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !builder.is_tensor(1)) return false;
    const Value log_probs = builder.operand(0);
    const auto& sizes = log_probs.geometry->sizes;
    if (log_probs.dtype != at::kFloat && log_probs.dtype != at::kDouble) return false;
    if (sizes.size() != 2 && sizes.size() != 3) return false;
    if (!has_valid_lengths(builder.argument(2), sizes[0])) return false;
    builder.key(dtype_word(log_probs));
    builder.operand(1);
    for (size_t i = 2; i < builder.num_arguments(); ++i) {
      if (builder.is_tensor(i)) {
        builder.operand(i);
      } else if (!builder.constant(i)) {
        return false;
      }
    }
    const bool single = sizes.size() == 2 || builder.argument(5).toInt() != at::Reduction::None;
    builder.result(single ? at::IntArrayRef() : at::IntArrayRef(sizes).slice(1, 1),
                   log_probs.dtype);
    return true;
  }

 private:
  // Whether eager accepts the lengths of the inputs. The op itself checks lengths in a tensor.
  static bool has_valid_lengths(const c10::IValue& lengths, int64_t longest) {
    return !lengths.isIntList() || std::ranges::all_of(lengths.toIntVector(), [&](int64_t length) {
      return length >= 0 && length <= longest;
    });
  }
};

}  // namespace

RuleTable ctc_rules() {
  const auto* rule = new CtcLossRule();
  return {{"aten::ctc_loss.IntList", rule}, {"aten::ctc_loss.Tensor", rule}};
}

}  // namespace autobatch

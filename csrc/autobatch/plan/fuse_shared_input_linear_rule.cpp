// The rule for products of one x with several weights (fuse_shared_input_linear.h). If one GEMM is
// faster than separate products, the rule concatenates the weights.
#include "autobatch/common/pool.h"
#include "autobatch/kernels/packed_weights.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/plan/fuse_shared_input_linear.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

using at::Tensor;

// Maximum size in bytes of the concatenated weights. A larger copy would not fit into the cache,
// and the time for the copy would exceed the time that the smaller number of calls saves. In a
// measurement with five gates and batches of tens of rows, a step took 5 to 10% less time with
// hidden size 128 (0.7 MB). With hidden size 256 (2.6 MB), a step took the same time or longer.
constexpr int64_t kMostJoined = 1 << 20;

class SiblingsRule final : public Rule {
 public:
  SiblingsRule(std::vector<Sibling> siblings, int64_t k) : siblings_(std::move(siblings)), k_(k) {
    for (const Sibling& s : siblings_) width_ += s.width;
  }

  bool heavy() const override { return true; }
  bool reads(size_t slot) const override {
    return std::none_of(siblings_.begin(), siblings_.end(),
                        [&](const Sibling& s) { return slot != 0 && s.bias == slot; });
  }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder&) const override { return false; }  // only the pass adds such nodes

  std::vector<Addend> addends(const Tape&, const Node&) const override {
    std::vector<Addend> out;
    for (const Sibling& s : siblings_) {
      if (s.bias != 0) out.push_back({s.bias, s.first, s.width, width_});
    }
    return out;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output_rows(0, width_);
    const Tensor x = batch.rows(0, k_);
    const bool biases = !batch.leaves_addends();
    if (const auto* joined = join(batch, biases))
      return multiply_into(out, x, joined->weight.t(), batch.store().copies, joined->bias);
    for (const Sibling& s : siblings_) {
      Tensor part = out.narrow(1, s.first, s.width);
      const bool adds = s.bias != 0 && biases;
      multiply_into(part, x, weight(batch, s).t(), batch.store().copies,
                    adds ? batch.single(s.bias) : Tensor());
    }
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor g = batch.grad_rows(0, width_);
    std::vector<const Sibling*> reached;
    for (const Sibling& s : siblings_) {
      if ((s.results & batch.reached_of_subgraph()) != 0) reached.push_back(&s);
    }
    if (batch.needs(0)) {
      batch.add_computed(0, {g.size(0), k_},
                         [&](Tensor& to) { gradient_of_x(batch, g, reached, to); });
    }
    Tensor x;
    for (const Sibling* s : reached) {
      const Tensor part = g.narrow(1, s->first, s->width);
      if (batch.needs(s->weight)) {
        if (!x.defined()) x = batch.rows(0, k_);
        s->by_row ? batch.add_product(s->weight, part, x) : batch.add_product(s->weight, x, part);
      }
      if (s->bias != 0 && batch.needs(s->bias)) batch.add_product(s->bias, part, Tensor());
    }
  }

 private:
  // Computes the gradient of x. Skips products that no gradient has reached, because zero times an
  // infinite weight is NaN.
  void gradient_of_x(BackwardBatch& batch, const Tensor& g,
                     const std::vector<const Sibling*>& reached, Tensor& sum) const {
    if (reached.size() == siblings_.size()) {
      if (const auto* joined = join(batch, false)) {
        return multiply_into(sum, g, joined->weight, batch.store().copies);
      }
    }
    for (const Sibling* s : reached) {
      const Tensor part = g.narrow(1, s->first, s->width);
      const Tensor w = weight(batch, *s);
      s == reached.front() ? multiply_into(sum, part, w, batch.store().copies)
                           : add_multiplied(sum, part, w, batch.store().copies);
    }
  }

  static Tensor weight(BatchView& batch, const Sibling& s) {  // returns [N, K]
    const Tensor w = batch.single(s.weight);
    return s.by_row ? w : w.t();
  }

  // Returns the concatenated weights, or null if separate products are faster. Backward passes
  // `biases` as false, because the backward computation does not read biases.
  const WeightCopies::Joined* join(BatchView& batch, bool biases) const {
    WeightCopies* all = batch.store().copies;
    const auto size = static_cast<int64_t>(c10::elementSize(batch.operand_value(0, 0).dtype));
    if (all == nullptr || width_ * k_ * size > kMostJoined) return nullptr;
    WeightCopies::Joined& entry = all->joined(&batch.signature());
    std::vector<const void*> from;
    for (const Sibling& s : siblings_) {
      from.push_back(batch.operand_region(0, s.weight).address());
      if (s.bias != 0 && biases) from.push_back(batch.operand_region(0, s.bias).address());
    }
    if (entry.from != from) copy(batch, entry, biases);
    entry.from = std::move(from);
    return &entry;
  }

  // Concatenates the weights in the layout of the first weight, so that in most cases rows are
  // copied unchanged.
  void copy(BatchView& batch, WeightCopies::Joined& entry, bool with_bias) const {
    const bool by_row = siblings_[0].by_row;
    std::vector<Tensor> weights, biases;
    for (const Sibling& s : siblings_) {
      const Tensor w = weight(batch, s);
      weights.push_back(by_row ? w : w.t());
      if (s.bias != 0 && with_bias) biases.push_back(batch.single(s.bias));
    }
    Tensor to = pooled_empty(width_ * k_, weights[0].options());
    to = by_row ? to.view({width_, k_}) : to.view({k_, width_});
    at::cat_out(to, weights, by_row ? 0 : 1);
    entry.weight = by_row ? to : to.t();
    if (!biases.empty()) entry.bias = at::cat(biases);
  }

  std::vector<Sibling> siblings_;
  int64_t k_, width_ = 0;
};

}  // namespace

std::shared_ptr<const Rule> make_siblings_rule(std::vector<Sibling> siblings, int64_t k) {
  return std::make_shared<SiblingsRule>(std::move(siblings), k);
}

}  // namespace autobatch

// Losses that are elementwise but for their reduction (mse_loss and kin), of instances of any
// shape: one call without the reduction, and a sum of each instance's part.
#include "autobatch/rules/elementwise_layout.h"
#include "autobatch/rules/rowwise.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>

namespace autobatch {
namespace {

using at::Tensor;

struct PointLoss {
  const char* op;
  size_t reduction;  // argument
};

const PointLoss kPointLosses[] = {
    {"aten::mse_loss", 2},
    {"aten::l1_loss", 2},
    {"aten::smooth_l1_loss", 2},
    {"aten::huber_loss", 2},
    {"aten::soft_margin_loss", 2},
    {"aten::kl_div", 2},
    {"aten::binary_cross_entropy", 3},
    {"aten::binary_cross_entropy_with_logits", 4},
    {"aten::hinge_embedding_loss", 3},
    {"aten::poisson_nll_loss", 5},
};

class PointLossRule final : public RowsCall {
 public:
  explicit PointLossRule(const PointLoss& entry) : entry_(entry) {}

  // Operands of one type; the first two of one shape, weights of one that broadcasts to it.
  bool capture(NodeBuilder& builder) const override {
    for (size_t i = 0; i < builder.num_arguments(); ++i) {
      if (builder.is_tensor(i)) {
        const Value x = builder.operand(i);
        const Value& first = builder.operand_value(0);
        if (!is_float(x) || x.dtype != first.dtype || !fits(builder, i, x, first)) return false;
        builder.key(dtype_word(x) << 1 | (x.requires_grad ? 1 : 0));
      } else if (builder.argument(i).isNone()) {
        builder.absent(i);
      } else if (!builder.constant(i)) {
        return false;
      }
    }
    if (builder.operands().size() < 2) return false;
    builder.key(static_cast<uint64_t>(builder.operand_value(0).geometry->dim()));
    return true;
  }

  const Geometry* geometry_of(NodeBuilder& builder, const Geometry* inferred) const override {
    if (builder.argument(entry_.reduction).toInt() != at::Reduction::None) return inferred;
    return builder.graph().geometries().intern_contiguous(builder.operand_value(0).geometry->sizes);
  }

 protected:
  Tensor operand(BatchView& batch, size_t slot) const override {
    if (!broadcasts(batch, slot)) return batch.flat(slot);
    GeometryTable geometries;
    Regions from;
    int64_t elements = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      from.push_back(spread(batch, m, geometries, batch.operand_region(m, slot)));
      elements += from.back().geometry->numel;
    }
    const Tensor out = at::empty({elements}, from[0].buffer->options());
    gather_into(from, out);
    return out;
  }

  // Autograd gives weights no gradient.
  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    batch.add(slot, grad);
  }

  void adjust(const BatchView&, torch::jit::Stack& arguments) const override {
    arguments[entry_.reduction] = at::Reduction::None;
  }

  void put(Batch& batch, const LocalGraph& graph) const override {
    if (reduction(batch) == at::Reduction::None) return RowsCall::put(batch, graph);
    const Counts counts = counts_of(batch);
    Tensor out = batch.output_rows(0, 1);
    segment_sum(graph.outputs[0].detach().unsqueeze(1), counts, out);
    if (reduction(batch) == at::Reduction::Mean) out.div_(lengths(counts, out));
  }

  std::vector<Tensor> gradients(BackwardBatch& batch, const LocalGraph& graph) const override {
    if (reduction(batch) == at::Reduction::None) return RowsCall::gradients(batch, graph);
    const Counts counts = counts_of(batch);
    Tensor g = batch.grad_rows(0, 1);
    if (reduction(batch) == at::Reduction::Mean) g = g / lengths(counts, g);
    return {repeat_rows(g, counts).squeeze(1)};
  }

 private:
  // Of a total eager's strides are no question.
  bool fits(const NodeBuilder& builder, size_t i, const Value& x, const Value& first) const {
    const bool each = builder.argument(entry_.reduction).toInt() == at::Reduction::None;
    if (each && !row_major_or_expanded(*x.geometry)) return false;
    const auto& sizes = first.geometry->sizes;
    if (i < 2 || x.geometry->sizes == sizes) return x.geometry->sizes == sizes;
    return at::is_expandable_to(x.geometry->sizes, sizes);
  }

  static bool broadcasts(const BatchView& batch, size_t slot) {
    for (int64_t m = 0; m < batch.size(); ++m) {
      if (batch.operand_value(m, slot).geometry->sizes != sizes_of(batch, m)) return true;
    }
    return false;
  }

  static const std::vector<int64_t>& sizes_of(const BatchView& batch, int64_t m) {
    return batch.operand_value(m, 0).geometry->sizes;
  }

  // A weight of a member, with an element for each of the loss.
  static Region spread(const BatchView& batch, int64_t m, GeometryTable& geometries,
                       const Region& region) {
    const Geometry& g = *region.geometry;
    const auto [sizes, strides] =
        at::inferExpandGeometry_dimvector(g.sizes, g.strides, sizes_of(batch, m));
    return {region.buffer, region.offset, geometries.intern(sizes, strides)};
  }

  int64_t reduction(const BatchView& batch) const {
    return batch.argument(entry_.reduction).toInt();
  }

  static Counts counts_of(const BatchView& batch) {
    Counts counts;
    for (int64_t m = 0; m < batch.size(); ++m) {
      counts.push_back(batch.operand_value(m, 0).geometry->numel);
    }
    return counts;
  }

  static Tensor lengths(const Counts& counts, const Tensor& like) {
    return at::tensor(counts, at::TensorOptions().dtype(at::kLong)).to(like.options()).unsqueeze(1);
  }

  const PointLoss& entry_;
};

}  // namespace

RuleTable point_loss_rules() {
  RuleTable table;
  for (const PointLoss& entry : kPointLosses) {
    table.push_back({entry.op, new PointLossRule(entry)});
  }
  return table;
}

}  // namespace autobatch

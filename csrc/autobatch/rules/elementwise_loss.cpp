// Losses that are elementwise except for their reduction, such as mse_loss, for instances of any
// shape. One call computes the loss of all elements without the reduction. The losses of each
// instance are then summed. This file also contains the rule of mse_loss_backward, which is
// captured if a gradient is computed inside a block.
#include "autobatch/kernels/to_device.h"
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
  size_t reduction;  // argument number
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

// Returns the number of elements of each member's operand.
Counts counts_of(const BatchView& batch, size_t slot) {
  Counts counts;
  for (int64_t m = 0; m < batch.size(); ++m) {
    counts.push_back(batch.operand_value(m, slot).geometry->numel);
  }
  return counts;
}

class PointLossRule final : public RowsCall {
 public:
  explicit PointLossRule(const PointLoss& entry) : entry_(entry) {}

  // All operands must have the same dtype. The first two operands must have the same shape, and
  // weights must broadcast to this shape.
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

  // No sum over broadcast dimensions is needed. Only weights are broadcast, and autograd computes
  // no gradient for them.
  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    batch.add(slot, grad);
  }

  void adjust(const BatchView&, torch::jit::Stack& arguments) const override {
    arguments[entry_.reduction] = at::Reduction::None;
  }

  void put(Batch& batch, const LocalGraph& graph) const override {
    if (reduction(batch) == at::Reduction::None) return RowsCall::put(batch, graph);
    const Counts counts = counts_of(batch, 0);
    Tensor out = batch.output_rows(0, 1);
    segment_sum(graph.outputs[0].detach().unsqueeze(1), counts, out);
    if (reduction(batch) == at::Reduction::Mean) out.div_(lengths(counts, out));
  }

  std::vector<Tensor> gradients(BackwardBatch& batch, const LocalGraph& graph) const override {
    if (reduction(batch) == at::Reduction::None) return RowsCall::gradients(batch, graph);
    const Counts counts = counts_of(batch, 0);
    Tensor g = batch.grad_rows(0, 1);
    if (reduction(batch) == at::Reduction::Mean) g = g / lengths(counts, g);
    return {repeat_rows(g, counts).squeeze(1)};
  }

 private:
  // Whether argument i, x, has a valid shape and layout. The layout is checked only if there is no
  // reduction, because otherwise the strides of the result do not depend on the layout.
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

  // Returns the region of a member's weight, expanded to the sizes of the member's operand 0.
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

  static Tensor lengths(const Counts& counts, const Tensor& like) {
    return to_device(at::tensor(counts, at::kLong).to(like.scalar_type()), like.device())
        .unsqueeze(1);
  }

  const PointLoss& entry_;
};

// The rule of mse_loss_backward(grad, x, y) with reduction to a mean or a sum. The result is (x -
// y) times a factor, and each instance has its own factor.
class SquaredErrorGradientRule final : public Rule {
 public:
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const int64_t reduction = builder.argument(3).toInt();
    if (reduction == at::Reduction::None) return false;
    for (size_t i = 0; i < 3; ++i) {
      if (!builder.is_tensor(i)) return false;
      const Value x = builder.operand(i);
      if (!is_float(x) || x.dtype != builder.operand_value(0).dtype) return false;
      if (!row_major(x)) return false;
    }
    const Geometry& of_loss = *builder.operand_value(0).geometry;
    const Geometry& x = *builder.operand_value(1).geometry;
    if (of_loss.dim() != 0 || x.sizes != builder.operand_value(2).geometry->sizes) return false;
    builder.key(dtype_word(builder.operand_value(0)));
    builder.constant(3);
    builder.result(x.sizes, builder.operand_value(0).dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output(0);
    at::mul_out(out, batch.flat(1) - batch.flat(2), repeated(batch, batch.rows(0, 1)));
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor g = batch.grad_flat(0);
    if (batch.needs(0)) {
      const Counts sizes = counts_of(batch, 1);
      const Tensor terms = g * (batch.flat(1) - batch.flat(2));
      Tensor sums = at::empty({batch.size(), 1}, g.options());
      segment_sum(terms.unsqueeze(1), sizes, sums);
      batch.add(0, sums * scales(batch, sums));
    }
    if (!batch.needs(1) && !batch.needs(2)) return;
    const Tensor of_difference = g * repeated(batch, batch.rows(0, 1));
    if (batch.needs(1)) batch.add(1, of_difference);
    if (batch.needs(2)) batch.add(2, of_difference.neg());
  }

 private:
  // Returns the constant factor of each instance, [n, 1]. The factor is 2 for a sum, and 2 divided
  // by the number of elements for a mean.
  static Tensor scales(const BatchView& batch, const Tensor& like) {
    std::vector<double> scales;
    const bool mean = batch.argument(3).toInt() == at::Reduction::Mean;
    for (int64_t count : counts_of(batch, 1)) {
      scales.push_back(mean ? 2.0 / static_cast<double>(count) : 2.0);
    }
    return to_device(at::tensor(scales, at::kDouble).to(like.scalar_type()), like.device())
        .unsqueeze(1);
  }

  // Multiplies the gradient of each instance's loss, [n, 1], by the constant factor of the
  // instance. Returns each product repeated for all elements of the instance.
  static Tensor repeated(const BatchView& batch, const Tensor& of_loss) {
    return repeat_rows(of_loss * scales(batch, of_loss), counts_of(batch, 1)).squeeze(1);
  }
};

}  // namespace

RuleTable point_loss_rules() {
  RuleTable table{{"aten::mse_loss_backward", new SquaredErrorGradientRule}};
  for (const PointLoss& entry : kPointLosses) {
    table.push_back({entry.op, new PointLossRule(entry)});
  }
  return table;
}

}  // namespace autobatch

// Gated linear units over any dimension, for instances of any size.
#include "autobatch/kernels/gather.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// glu(x, dim) splits x into two halves along `dim`, and multiplies the first half by the sigmoid of
// the second half.
class GluRule final : public Rule {
 public:
  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    const int64_t rank = x.geometry->dim();
    if (!is_float(x) || !row_major(x) || rank == 0) return false;
    const int64_t given = builder.argument(1).toInt(), dim = given < 0 ? given + rank : given;
    if (dim < 0 || dim >= rank) return false;  // eager raises the error
    at::DimVector sizes(x.geometry->sizes.begin(), x.geometry->sizes.end());
    if (sizes[dim] % 2 != 0) return false;
    sizes[dim] /= 2;
    builder.key(dtype_word(x) << 16 | static_cast<uint64_t>(rank) << 8 |
                static_cast<uint64_t>(dim));
    builder.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output(0).unsqueeze(0);
    at::glu_out(out, halves_of(batch), 0);
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor gradient = at::glu_backward(batch.grad_flat(0).unsqueeze(0), halves_of(batch), 0);
    GeometryTable geometries;
    Regions from, to;
    for (int64_t half = 0; half < 2; ++half) {
      int64_t start = half * gradient.size(1);
      for (int64_t m = 0; m < batch.size(); ++m) {
        const ValueId x = batch.operand(m, 0);
        const Geometry* dense = batch.result_value(m, 0).geometry;
        const int64_t offset = std::exchange(start, start + dense->numel);
        if (!batch.wanted(x)) continue;
        from.push_back({&gradient, offset, dense});
        to.push_back(half_of(batch, m, batch.target(m, x), half, geometries));
      }
    }
    add_regions(from, to);
  }

 private:
  // Splits each member's operand into two halves. Returns a matrix with two rows: row 0 contains
  // the first halves of all members, and row 1 contains the second halves.
  static Tensor halves_of(BatchView& batch) {
    int64_t total = 0;
    for (int64_t m = 0; m < batch.size(); ++m) total += batch.result_value(m, 0).geometry->numel;
    const Tensor halves = at::empty({2, total}, batch.operand_value(0, 0).options());
    GeometryTable geometries;
    for (int64_t half = 0; half < 2; ++half) {
      Regions regions;
      for (int64_t m = 0; m < batch.size(); ++m) {
        regions.push_back(half_of(batch, m, batch.operand_region(m, 0), half, geometries));
      }
      gather_into(regions, halves[half]);
    }
    return halves;
  }

  static Region half_of(const BatchView& batch, int64_t m, const Region& x, int64_t half,
                        GeometryTable& geometries) {
    const auto& strides = x.geometry->strides;
    const int64_t given = batch.argument(1).toInt();
    const auto dim = static_cast<size_t>(given < 0 ? given + x.geometry->dim() : given);
    const auto& sizes = batch.result_value(m, 0).geometry->sizes;
    return {x.buffer, x.offset + half * sizes[dim] * strides[dim],
            geometries.intern(sizes, strides)};
  }
};

}  // namespace

RuleTable glu_rules() { return {{"aten::glu", new GluRule()}}; }

}  // namespace autobatch

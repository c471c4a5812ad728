// Reductions that segment_ops.cpp does not cover. For sums and means over dimensions that are not
// adjacent, a batch contains instances of one shape. For softmax over the last dimension, it
// contains instances with any number of rows. For medians, it contains instances with equal numbers
// of elements.
#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// Returns the dimensions that a call reduces, sorted. Negative numbers are converted.
std::vector<int64_t> reduced_dims(const c10::IValue& dims, int64_t rank) {
  std::vector<int64_t> out = dims.toIntVector();
  for (int64_t& d : out) {
    if (d < 0) d += rank;
  }
  std::sort(out.begin(), out.end());
  return out;
}

bool valid(const std::vector<int64_t>& dims, int64_t rank) {
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] < 0 || dims[i] >= rank || (i > 0 && dims[i] == dims[i - 1])) return false;
  }
  return true;
}

at::DimVector reduced_sizes(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dims,
                            bool keepdim) {
  at::DimVector out;
  size_t next = 0;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    if (next < dims.size() && dims[next] == d) {
      ++next;
      if (keepdim) out.push_back(1);
    } else {
      out.push_back(sizes[d]);
    }
  }
  return out;
}

// sum.dim_IntList(x, dims, keepdim, dtype), or mean.dim with the same arguments.
struct Reduction {
  const char* op;
  bool mean;
};

const Reduction kReductions[] = {
    {"aten::sum.dim_IntList", false},
    {"aten::mean.dim", true},
};

// The rule of sums and means over any dimensions, for instances of one shape.
class AnyDimsRule final : public Rule {
 public:
  explicit AnyDimsRule(const Reduction& entry) : entry_(entry) {}

  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.argument(1).isIntList() || !builder.argument(3).isNone()) return false;
    const Value x = builder.operand(0);
    const Geometry& g = *x.geometry;
    if (!is_float(x) || !row_major(x) || g.numel == 0) return false;
    const auto dims = reduced_dims(builder.argument(1), g.dim());
    if (!valid(dims, g.dim()) || !builder.constant(1) || !builder.constant(2)) return false;
    builder.key(dtype_word(x));
    builder.key(g.canonical);
    builder.result(reduced_sizes(g.sizes, dims, builder.argument(2).toBool()), x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output_stacked(0);
    const auto dims = dims_of(batch);
    const Tensor x = batch.stacked(0);
    entry_.mean ? at::mean_out(out, x, dims, keeps_dims(batch))
                : at::sum_out(out, x, dims, keeps_dims(batch));
  }

  void backward(BackwardBatch& batch) const override {
    Tensor g = batch.grad_stacked(0);
    const at::DimVector sizes =
        stacked_sizes(batch.size(), batch.operand_value(0, 0).geometry->sizes);
    int64_t count = 1;
    for (int64_t d : dims_of(batch)) {
      if (!keeps_dims(batch)) g = g.unsqueeze(d);
      count *= sizes[d];
    }
    if (entry_.mean) g = g / count;
    batch.add(0, g.expand(sizes));
  }

 private:
  static bool keeps_dims(const BatchView& batch) { return batch.argument(2).toBool(); }
  // Returns the reduced dimensions of the stacked operand. The first dimension of this operand is
  // the batch dimension.
  static std::vector<int64_t> dims_of(const BatchView& batch) {
    auto dims = reduced_dims(batch.argument(1), batch.operand_value(0, 0).geometry->dim());
    for (int64_t& d : dims) ++d;
    return dims;
  }

  const Reduction& entry_;
};

// --- softmax and log_softmax ---

struct Softmax {
  const char* op;
  Tensor& (*forward)(Tensor& out, const Tensor& x, int64_t dim, bool half_to_float);
  Tensor (*backward)(const Tensor& g, const Tensor& y, int64_t dim, at::ScalarType dtype);
};

const Softmax kSoftmax[] = {
    {"aten::softmax.int", at::_softmax_out, at::_softmax_backward_data},
    {"aten::log_softmax.int", at::_log_softmax_out, at::_log_softmax_backward_data},
};

// The rule of softmax over the last dimension, if there is no kernel for rows of different widths.
// All rows of a batch have the same width. segment_ops.cpp covers the other calls.
class SoftmaxRule final : public Rule {
 public:
  explicit SoftmaxRule(const Softmax& entry) : entry_(entry) {}

  bool capture(NodeBuilder& builder) const override {
    if (!builder.argument(2).isNone()) return false;
    const Value x = builder.operand(0);
    const Geometry& g = *x.geometry;
    if (!is_float(x) || !row_major(x) || g.dim() == 0) return false;
    const int64_t dim = wrapped(builder.argument(1).toInt(), g.dim());
    if (dim < 0 || dim >= g.dim()) {
      builder.leave_to_eager();
      return false;
    }
    if (has_host_memory(x.device) && has_cpu_kernels(x.dtype)) return false;
    if (g.dim() == 1 || dim != g.dim() - 1 || g.sizes.back() == 0) return false;
    builder.key(dtype_word(x));
    // The meaning of a negative dimension depends on the rank, so the dimension and the rank are
    // both part of the key.
    builder.key(static_cast<uint64_t>(g.dim()) << 32 | static_cast<uint64_t>(dim));
    builder.key(static_cast<uint64_t>(g.sizes.back()));
    builder.result(g.canonical, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t width = width_of(batch);
    Tensor out = batch.output_rows(0, width);
    entry_.forward(out, batch.rows(0, width), 1, false);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch);
    batch.add(0, entry_.backward(batch.grad_rows(0, width), batch.result_rows(0, width), 1,
                                 batch.result_value(0, 0).dtype));
  }

 private:
  static int64_t wrapped(int64_t dim, int64_t rank) { return dim < 0 ? dim + rank : dim; }
  static int64_t width_of(const BatchView& batch) {
    return batch.result_value(0, 0).geometry->sizes.back();
  }

  const Softmax& entry_;
};

// --- medians ---

// The rule of median(x) and nanmedian(x), for instances with equal numbers of elements. If several
// elements are equal to the median, eager divides the gradient evenly among these elements.
// functorch's rules are not used, because they reduce over a dimension, and such a reduction has a
// gradient for only one of the equal elements.
class MedianRule final : public Rule {
 public:
  using Forward = std::tuple<Tensor, Tensor> (*)(const Tensor& x, int64_t dim, bool keepdim);
  explicit MedianRule(Forward forward) : forward_(forward) {}

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (!is_float(x) || x.geometry->numel == 0) return false;
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(x.geometry->numel));
    builder.result(at::IntArrayRef{}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    batch.output(0).copy_(std::get<0>(forward_(batch.rows(0, width_of(batch)), 1, false)));
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor x = batch.rows(0, width_of(batch));
    const Tensor y = batch.result_rows(0, 1);
    // If the median is NaN, the gradient is passed to the elements that are NaN.
    const Tensor reached = (x == y).logical_or_(x.isnan().logical_and_(y.isnan()));
    const Tensor share = batch.grad_rows(0, 1) / reached.sum(1, /*keepdim=*/true);
    // As in eager, the product or at::where is used, because these two have different results for
    // an infinite gradient.
    batch.add(0, multiplies_by_masks(x.device())
                     ? reached * share
                     : at::where(reached, share, at::zeros({}, share.options())));
  }

 private:
  static int64_t width_of(const BatchView& batch) {
    return batch.operand_value(0, 0).geometry->numel;
  }

  Forward forward_;
};

// --- operands without dimensions ---

// Ops that return an operand unchanged if it has no dimensions. In backward, NumberRule also
// returns the gradient unchanged. The general formulas of these ops contain powers or quotients,
// which would change the gradient of an infinite value.
struct NumberOp {
  const char* op;
  int dim, dtype;  // argument numbers, or -1
};

constexpr NumberOp kNumberOps[] = {
    {"aten::prod", -1, 1}, {"aten::prod.dim_int", 1, 3}, {"aten::logcumsumexp", 1, -1}};

class NumberRule final : public Rule {
 public:
  explicit NumberRule(const NumberOp& entry) : entry_(entry) {}

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (x.geometry->dim() != 0 || !(is_float(x) || c10::isComplexType(x.dtype))) return false;
    if (entry_.dim >= 0) {
      const int64_t dim = builder.argument(static_cast<size_t>(entry_.dim)).toInt();
      if (dim != 0 && dim != -1) return false;  // eager raises the error
    }
    if (entry_.dtype >= 0) {
      const c10::IValue& dtype = builder.argument(static_cast<size_t>(entry_.dtype));
      if (!dtype.isNone() && dtype.toScalarType() != x.dtype) return false;
    }
    builder.key(dtype_word(x));
    builder.result(at::IntArrayRef{}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override { batch.output(0).copy_(batch.flat(0)); }
  void backward(BackwardBatch& batch) const override { batch.add(0, batch.grad_flat(0)); }

 private:
  const NumberOp& entry_;
};

}  // namespace

RuleTable reduce_rules() {
  RuleTable table;
  for (const NumberOp& entry : kNumberOps) table.push_back({entry.op, new NumberRule(entry)});
  for (const Softmax& entry : kSoftmax) table.push_back({entry.op, new SoftmaxRule(entry)});
  for (const RuleEntry& entry : segment_rules()) table.push_back(entry);
  for (const Reduction& entry : kReductions) table.push_back({entry.op, new AnyDimsRule(entry)});
  table.push_back({"aten::median", new MedianRule(at::median)});
  table.push_back({"aten::nanmedian", new MedianRule(at::nanmedian)});
  return table;
}

}  // namespace autobatch

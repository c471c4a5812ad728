// The largest, the smallest, the middle one and the product of all elements of an instance.
// functorch's rules have the same values and other gradients: `max`, `min` and `median` go through
// the reduction over one dimension, whose gradient all goes to one of several equal elements, where
// eager shares it evenly among them; that of its `prod` is always the product of the others, where
// eager divides if it can.
#include "autobatch/rules.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

int64_t width_of(const BatchView& batch) { return batch.operand_value(0, 0).geometry->numel; }

Tensor& median_out(Tensor& out, const Tensor& x, at::IntArrayRef dim, bool keepdim) {
  return out.copy_(std::get<0>(at::median(x, dim[0], keepdim)));
}

Tensor& nanmedian_out(Tensor& out, const Tensor& x, at::IntArrayRef dim, bool keepdim) {
  return out.copy_(std::get<0>(at::nanmedian(x, dim[0], keepdim)));
}

// max(x), min(x) and median(x), of instances of one number of elements.
class ExtremumRule final : public Rule {
 public:
  using Forward = Tensor& (*)(Tensor& out, const Tensor& x, at::IntArrayRef dim, bool keepdim);
  explicit ExtremumRule(Forward forward) : forward_(forward) {}

  bool capture(Draft& draft) const override {
    const Value x = draft.operand(0);
    if (!is_float(x) || x.geometry->numel == 0) return false;
    draft.key(dtype_word(x));
    draft.key(static_cast<uint64_t>(x.geometry->numel));
    draft.result(at::IntArrayRef{}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output(0);
    forward_(out, batch.rows(0, width_of(batch)), 1, false);
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor x = batch.rows(0, width_of(batch));
    const Tensor y = batch.result_rows(0, 1);
    // That of what has a NaN is NaN.
    const Tensor reached = (x == y).logical_or_(x.isnan().logical_and_(y.isnan()));
    const Tensor share = batch.grad_rows(0, 1) / reached.sum(1, /*keepdim=*/true);
    batch.add(0, at::where(reached, share, at::zeros({}, share.options())));
  }

 private:
  static int64_t width(const BatchView& batch) { return batch.operand_value(0, 0).geometry->numel; }

  Forward forward_;
};

// For each element along `dim` the product of those before it.
Tensor product_before(const Tensor& x, int64_t dim) {
  const Tensor ones = at::ones_like(x.narrow(dim, 0, 1));
  return at::cat({ones, x.narrow(dim, 0, x.size(dim) - 1)}, dim).cumprod(dim);
}

// As autograd differentiates a product y, [n, ..] with `dim` kept: by division where an instance
// has no zero, else as the product of the others; zero, where `or_zero`, if several factors are.
Tensor product_backward(const Tensor& g, const Tensor& x, const Tensor& y, int64_t dim,
                        bool or_zero) {
  at::DimVector all;
  for (int64_t d = 1; d < x.dim(); ++d) all.push_back(d);
  const Tensor zeros = (x == 0).sum(all, /*keepdim=*/true);
  const Tensor divided = g * (y / x);
  if (!zeros.any().item<bool>()) return divided;
  Tensor others = g * (product_before(x, dim) * product_before(x.flip(dim), dim).flip(dim));
  if (or_zero) others = at::where(zeros == 1, others, at::zeros({}, x.options()));
  return at::where(zeros == 0, divided, others);
}

bool keeps_dtype(const c10::IValue& dtype, const Value& x) {
  return dtype.isNone() || dtype.toScalarType() == x.dtype;
}

// prod(x), of instances of one number of elements.
class ProductRule final : public Rule {
 public:
  bool capture(Draft& draft) const override {
    const Value x = draft.operand(0);
    if (!keeps_dtype(draft.argument(1), x)) return false;
    if (!is_float(x) || x.geometry->numel == 0 || x.geometry->dim() == 0) return false;
    draft.key(dtype_word(x));
    draft.key(static_cast<uint64_t>(x.geometry->numel));
    draft.result(at::IntArrayRef{}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output(0);
    at::prod_out(out, batch.rows(0, width_of(batch)), 1);
  }

  void backward(BackwardBatch& batch) const override {
    batch.add(0, product_backward(batch.grad_rows(0, 1), batch.rows(0, width_of(batch)),
                                  batch.result_rows(0, 1), 1, /*or_zero=*/true));
  }
};

// prod(x, dim, keepdim), of instances of one shape.
class DimProductRule final : public Rule {
 public:
  bool capture(Draft& draft) const override {
    const Value x = draft.operand(0);
    if (!keeps_dtype(draft.argument(3), x)) return false;
    const Geometry& g = *x.geometry;
    if (!is_float(x) || !row_major(x) || g.numel == 0 || g.dim() == 0) return false;
    const int64_t dim = wrapped(draft.argument(1).toInt(), g.dim());
    if (dim < 0 || dim >= g.dim()) return false;  // eager raises the error
    draft.key(dtype_word(x));
    draft.key(g.canonical);
    draft.key(static_cast<uint64_t>(dim) << 1 | (draft.argument(2).toBool() ? 1 : 0));
    at::DimVector sizes(g.sizes.begin(), g.sizes.end());
    sizes[dim] = 1;
    if (!draft.argument(2).toBool()) sizes.erase(sizes.begin() + dim);
    draft.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output_stacked(0);
    at::prod_out(out, batch.stacked(0), dim_of(batch), batch.argument(2).toBool());
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t dim = dim_of(batch);
    Tensor g = batch.grad_stacked(0), y = batch.result_stacked(0);
    if (!batch.argument(2).toBool()) g = g.unsqueeze(dim), y = y.unsqueeze(dim);
    batch.add(0, product_backward(g, batch.stacked(0), y, dim, /*or_zero=*/false));
  }

 private:
  static int64_t wrapped(int64_t dim, int64_t rank) { return dim < 0 ? dim + rank : dim; }
  // In the stacked operand, whose dimensions are one further back.
  static int64_t dim_of(const BatchView& batch) {
    return wrapped(batch.argument(1).toInt(), batch.operand_value(0, 0).geometry->dim()) + 1;
  }
};

}  // namespace

RuleTable extrema_rules() {
  return {{"aten::max", new ExtremumRule(at::amax_out)},
          {"aten::min", new ExtremumRule(at::amin_out)},
          {"aten::median", new ExtremumRule(median_out)},
          {"aten::nanmedian", new ExtremumRule(nanmedian_out)},
          {"aten::prod", new ProductRule()},
          {"aten::prod.dim_int", new DimProductRule()}};
}

}  // namespace autobatch

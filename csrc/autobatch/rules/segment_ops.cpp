// Reductions and scans over a range of dimensions, for instances of any length. An instance is
// viewed as rows of `inner` elements. A row consists of the elements of the dimensions after the
// range, or of only the last of these dimensions. A segment consists of consecutive rows, one for
// each position in the range. Each position in the dimensions before the range has one segment.
#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/segment_reduce.h"
#include "autobatch/kernels/segment_softmax.h"
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/rule.h"
#include "autobatch/rules/segment_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace autobatch {
namespace {

using at::Tensor;

// --- segments ---

struct Segments {
  Counts counts;     // by segment: number of rows
  Counts instances;  // by instance: number of segments
  int64_t inner = 1;
  bool equal = true;   // whether all segments have one length
  bool moved = false;  // whether the rows are in the order of rows_by_segment()

  int64_t size() const { return static_cast<int64_t>(counts.size()); }
  // Views rows as [segments, length, inner]. `equal` must be true.
  Tensor stacked(const Tensor& rows) const { return rows.view({size(), counts[0], inner}); }
  // Like stacked(), but returns [segments, length] if `inner` is 1, because ATen has faster kernels
  // for the last dimension.
  Tensor matrix(const Tensor& rows) const {
    return inner == 1 ? rows.view({size(), counts[0]}) : stacked(rows);
  }
  Tensor sum(const Tensor& rows) const {
    const bool counted = c10::isIntegralType(rows.scalar_type(), true);
    Tensor out =
        at::empty({size(), inner}, counted ? rows.options().dtype(at::kLong) : rows.options());
    sum_into(rows, out);
    return out;
  }
  void sum_into(const Tensor& rows, Tensor& out) const {
    if (equal && size() > 0 && (size() == 1 || inner == 1 || counts[0] > 64)) {
      at::sum_out(out, stacked(rows), 1);
    } else {
      segment_sum(rows, counts, out);
    }
  }
  Tensor max(const Tensor& rows) const {
    Tensor values = at::empty({size(), inner}, rows.options());
    Tensor indices = at::empty({size(), inner}, rows.options().dtype(at::kLong));
    segment_extreme(rows, counts, true, values, indices);
    return values;
  }
  // Repeats row i of `each` for each row of segment i.
  Tensor repeat(const Tensor& each) const { return repeat_rows(each, counts); }
  // Returns the lengths as a column, with the dtype and device of `like`.
  Tensor lengths(const Tensor& like) const {
    return to_device(at::tensor(counts, at::kLong).to(like.scalar_type()), like.device())
        .unsqueeze(1);
  }
};

using Arguments = std::vector<c10::IValue>;

// --- the ops ---

// The values that backward reads.
enum class Saves : uint8_t { kNothing, kOperand, kResult, kBoth };
// The dtypes of the operand and of the result.
enum class Types : uint8_t { kFloat, kAny, kSum, kIndex, kBool };

struct SegmentOp {
  const char* op;
  int dims;     // argument number, or -1 if all dimensions are reduced
  int keepdim;  // argument number, or -1 if there is no such argument
  int dtype;    // number of an argument that must be None or the operand's dtype, or -1
  Types types;
  bool reduces;  // whether the result has one row per segment, and not one per row of x
  bool empty;    // whether a segment may have no rows
  Saves saves;
  void (*forward)(std::vector<Tensor>& outs, const Tensor& x, const Segments& s,
                  const Arguments& a);
  // Returns the gradient of x, given g (the gradient of the result), x and y (the results).
  Tensor (*backward)(const Tensor& g, const Tensor& x, const std::vector<Tensor>& y,
                     const Segments& s, const Arguments& a);
};

#define FORWARD(...)                                                                           \
  [](std::vector<Tensor>& o, const Tensor& x, const Segments& s, const Arguments& a) -> void { \
    (void)o, (void)x, (void)s, (void)a;                                                        \
    __VA_ARGS__;                                                                               \
  }
#define GRADIENT(...)                                                                   \
  [](const Tensor& g, const Tensor& x, const std::vector<Tensor>& y, const Segments& s, \
     const Arguments& a) -> Tensor {                                                    \
    (void)g, (void)x, (void)y, (void)s, (void)a;                                        \
    return __VA_ARGS__;                                                                 \
  }
#define NO_GRADIENT GRADIENT(Tensor())

void mean(Tensor& out, const Tensor& x, const Segments& s) {
  s.sum_into(x, out);
  out.div_(s.lengths(out));
}

// Divides the gradient evenly among the elements that are equal to the extreme `y`. `with_nan`:
// whether NaN is treated as equal to NaN, as in eager's `max()`.
Tensor share(const Tensor& g, const Tensor& x, const Tensor& y, const Segments& s, bool with_nan) {
  const Tensor extreme = s.repeat(y);
  Tensor is = x.eq(extreme);
  if (with_nan) is = is.logical_or(x.isnan().logical_and(extreme.isnan()));
  const Tensor shares = s.repeat(g / s.sum(is).to(g.scalar_type()));
  // In eager, `max()` uses at::where, except on CUDA. All other calls multiply by the mask. For an
  // infinite gradient, the results differ.
  return with_nan && !multiplies_by_masks(x.device())
             ? at::where(is, shares, at::zeros({}, shares.options()))
             : shares * is;
}

void extreme(std::vector<Tensor>& o, const Tensor& x, const Segments& s, bool largest) {
  Tensor other = at::empty(o[0].sizes(), x.options().dtype(at::kLong));
  segment_extreme(x, s.counts, largest, o[0], o.size() > 1 ? o[1] : other);
}

void extreme_index(Tensor& out, const Tensor& x, const Segments& s, bool largest) {
  Tensor values = at::empty(out.sizes(), x.options());
  segment_extreme(x, s.counts, largest, values, out);
}

void logsumexp(Tensor& out, const Tensor& x, const Segments& s) {
  Tensor largest = s.max(x);
  largest.masked_fill_(largest.abs().ge(std::numeric_limits<double>::infinity()), 0);
  for (int64_t i = 0; i < s.size(); ++i) {
    if (s.counts[i] == 0) largest[i].zero_();
  }
  at::log_out(out, s.sum((x - s.repeat(largest)).exp_()));
  out.add_(largest);
}

void softmax(Tensor& out, const Tensor& x, const Segments& s, bool log) {
  if (s.equal && s.size() > 0) {
    Tensor all = s.matrix(out);
    log ? at::_log_softmax_out(all, s.matrix(x), 1, false)
        : at::_softmax_out(all, s.matrix(x), 1, false);
  } else if (s.inner == 1 && has_softmax_kernel(x)) {
    segment_softmax(x, s.counts, log, out);
  } else if (log) {
    at::sub_out(out, x, s.repeat(s.max(x)));
    out.sub_(s.repeat(s.sum(out.exp()).log_()));
  } else {
    at::exp_out(out, x - s.repeat(s.max(x)));
    out.div_(s.repeat(s.sum(out)));
  }
}

Tensor softmax_gradient(const Tensor& g, const Tensor& y, const Segments& s, bool log) {
  if (s.equal && s.size() > 0) {
    const Tensor gradients = s.matrix(g), results = s.matrix(y);
    const Tensor own = log ? at::_log_softmax_backward_data(gradients, results, 1, y.scalar_type())
                           : at::_softmax_backward_data(gradients, results, 1, y.scalar_type());
    return own.view_as(y);
  }
  if (s.inner == 1 && has_softmax_kernel(y)) return segment_softmax_gradient(g, y, s.counts, log);
  return log ? g - y.exp() * s.repeat(s.sum(g)) : y * (g - s.repeat(s.sum(g * y)));
}

// Returns the correction of a variance. The arguments are (x, dim, unbiased or correction, keepdim)
// or (x, unbiased).
double correction(const Arguments& a) {
  const c10::IValue& value = a.size() == 2 ? a[1] : a[2];
  if (value.isNone()) return 1;
  return value.isBool() ? (value.toBool() ? 1 : 0) : value.toScalar().toDouble();
}

Tensor deviations(const Tensor& x, const Segments& s) {
  return x - s.repeat(s.sum(x).div_(s.lengths(x)));
}

Tensor degrees(const Tensor& x, const Segments& s, const Arguments& a) {
  return s.lengths(x) - correction(a);
}

void variance(Tensor& out, const Tensor& x, const Segments& s, const Arguments& a) {
  s.sum_into(deviations(x, s).square_(), out);
  const Tensor divisors = degrees(x, s, a);
  for (int64_t count : s.counts) {
    if (static_cast<double>(count) > correction(a)) continue;
    TORCH_WARN(
        "var(): degrees of freedom is <= 0. Correction should be strictly less than the "
        "reduction factor (input numel divided by output numel).");
    break;
  }
  out.div_(divisors.clamp_min(0));
}

Tensor variance_gradient(const Tensor& g, const Tensor& x, const Segments& s, const Arguments& a) {
  return s.repeat(2 / degrees(x, s, a) * g) * deviations(x, s);
}

Tensor deviation_gradient(const Tensor& g, const Tensor& x, const Tensor& y, const Segments& s,
                          const Arguments& a) {
  return variance_gradient((g / (y * 2)).masked_fill_(y.eq(0), 0), x, s, a);
}

void norm(Tensor& out, const Tensor& x, const Segments& s) {
  s.sum_into(x.square(), out);
  out.sqrt_();
  // The norm of a single row is its absolute value, as in eager, because the square may overflow or
  // underflow.
  int64_t row = 0;
  for (int64_t i = 0; i < s.size(); row += s.counts[i++]) {
    if (s.counts[i] == 1) out.select(0, i).copy_(x.select(0, row).abs());
  }
}

Tensor norm_gradient(const Tensor& g, const Tensor& x, const Tensor& y, const Segments& s) {
  return x * s.repeat((g / y).masked_fill_(y.eq(0), 0));
}

// Returns the rows, rotated by `shift` positions within each segment.
Tensor rolled(const Tensor& rows, const Segments& s, int64_t shift) {
  const Tensor order = at::empty({rows.size(0)}, at::kLong);
  int64_t* at = order.mutable_data_ptr<int64_t>();
  int64_t start = 0;
  for (int64_t c : s.counts) {
    for (int64_t r = 0; r < c; ++r) *at++ = start + ((r - shift) % c + c) % c;
    start += c;
  }
  return rows.index_select(0, to_device(order, rows.device()));
}

int64_t shift_of(const Arguments& a) { return a[1].toIntVector()[0]; }

#define SUM FORWARD(s.sum_into(x, o[0])), GRADIENT(s.repeat(g))
#define MEAN FORWARD(mean(o[0], x, s)), GRADIENT(s.repeat(g / s.lengths(g)))
#define SOFTMAX(log) FORWARD(softmax(o[0], x, s, log)), GRADIENT(softmax_gradient(g, y[0], s, log))
#define EXTREME(largest, with_nan) \
  FORWARD(extreme(o, x, s, largest)), GRADIENT(share(g, x, y[0], s, with_nan))
#define SELECT(largest) \
  FORWARD(extreme(o, x, s, largest)), GRADIENT(scatter_to_rows(g, y[1], s.counts))
#define INDEX(largest) FORWARD(extreme_index(o[0], x, s, largest)), NO_GRADIENT
#define ANY FORWARD(at::gt_out(o[0], s.sum(x), 0)), NO_GRADIENT
#define ALL FORWARD(at::eq_out(o[0], s.sum(x.logical_not()), 0)), NO_GRADIENT
#define VARIANCE FORWARD(variance(o[0], x, s, a)), GRADIENT(variance_gradient(g, x, s, a))
#define DEVIATION \
  FORWARD(variance(o[0], x, s, a); o[0].sqrt_()), GRADIENT(deviation_gradient(g, x, y[0], s, a))
#define NORM FORWARD(norm(o[0], x, s)), GRADIENT(norm_gradient(g, x, y[0], s))
#define PROD(whole)                         \
  FORWARD(segment_prod(x, s.counts, o[0])), \
      GRADIENT(s.repeat(g) * product_gradient(x, s.counts, s.instances, whole))

const SegmentOp kOps[] = {
    // The columns are name, dims, keepdim, dtype, types, reduces, empty, saves, forward and
    // backward.
    {"aten::sum", -1, -1, 1, Types::kSum, true, true, Saves::kNothing, SUM},
    {"aten::sum.dim_IntList", 1, 2, 3, Types::kSum, true, true, Saves::kNothing, SUM},
    {"aten::mean", -1, -1, 1, Types::kFloat, true, true, Saves::kNothing, MEAN},
    {"aten::mean.dim", 1, 2, 3, Types::kFloat, true, true, Saves::kNothing, MEAN},
    {"aten::amax", 1, 2, -1, Types::kFloat, true, false, Saves::kBoth, EXTREME(true, false)},
    {"aten::amin", 1, 2, -1, Types::kFloat, true, false, Saves::kBoth, EXTREME(false, false)},
    {"aten::max", -1, -1, -1, Types::kFloat, true, false, Saves::kBoth, EXTREME(true, true)},
    {"aten::min", -1, -1, -1, Types::kFloat, true, false, Saves::kBoth, EXTREME(false, true)},
    {"aten::max.dim", 1, 2, -1, Types::kFloat, true, false, Saves::kResult, SELECT(true)},
    {"aten::min.dim", 1, 2, -1, Types::kFloat, true, false, Saves::kResult, SELECT(false)},
    {"aten::argmax", 1, 2, -1, Types::kIndex, true, false, Saves::kNothing, INDEX(true)},
    {"aten::argmin", 1, 2, -1, Types::kIndex, true, false, Saves::kNothing, INDEX(false)},
    {"aten::any", -1, -1, -1, Types::kBool, true, true, Saves::kNothing, ANY},
    {"aten::any.dim", 1, 2, -1, Types::kBool, true, true, Saves::kNothing, ANY},
    {"aten::_is_any_true", -1, -1, -1, Types::kBool, true, true, Saves::kNothing, ANY},
    {"aten::_is_all_true", -1, -1, -1, Types::kBool, true, true, Saves::kNothing, ALL},
    {"aten::all", -1, -1, -1, Types::kBool, true, true, Saves::kNothing, ALL},
    {"aten::all.dim", 1, 2, -1, Types::kBool, true, true, Saves::kNothing, ALL},
    {"aten::logsumexp", 1, 2, -1, Types::kFloat, true, true, Saves::kBoth,
     FORWARD(logsumexp(o[0], x, s)), GRADIENT(s.repeat(g) * (x - s.repeat(y[0])).exp_())},
    {"aten::softmax.int", 1, -1, 2, Types::kFloat, false, true, Saves::kResult, SOFTMAX(false)},
    {"aten::log_softmax.int", 1, -1, 2, Types::kFloat, false, true, Saves::kResult, SOFTMAX(true)},
    {"aten::cumsum", 1, -1, 2, Types::kFloat, false, true, Saves::kNothing,
     FORWARD(segment_cumsum(x, s.counts, false, o[0])),
     [](const Tensor& g, const Tensor&, const std::vector<Tensor>&, const Segments& s,
        const Arguments&) -> Tensor {
       Tensor out = at::empty(g.sizes(), g.options());
       segment_cumsum(g, s.counts, true, out);
       return out;
     }},
    {"aten::flip", 1, -1, -1, Types::kAny, false, true, Saves::kNothing,
     FORWARD(o[0].copy_(reversed_rows(x, s.counts))), GRADIENT(reversed_rows(g, s.counts))},
    {"aten::roll", 2, -1, -1, Types::kAny, false, true, Saves::kNothing,
     FORWARD(o[0].copy_(rolled(x, s, shift_of(a)))), GRADIENT(rolled(g, s, -shift_of(a)))},
    {"aten::var", -1, -1, -1, Types::kFloat, true, true, Saves::kOperand, VARIANCE},
    {"aten::var.dim", 1, 3, -1, Types::kFloat, true, true, Saves::kOperand, VARIANCE},
    {"aten::var.correction", 1, 3, -1, Types::kFloat, true, true, Saves::kOperand, VARIANCE},
    {"aten::std", -1, -1, -1, Types::kFloat, true, true, Saves::kBoth, DEVIATION},
    {"aten::std.dim", 1, 3, -1, Types::kFloat, true, true, Saves::kBoth, DEVIATION},
    {"aten::std.correction", 1, 3, -1, Types::kFloat, true, true, Saves::kBoth, DEVIATION},
    {"aten::norm.Scalar", -1, -1, -1, Types::kFloat, true, true, Saves::kBoth, NORM},
    {"aten::norm.ScalarOpt_dim", 2, 3, -1, Types::kFloat, true, true, Saves::kBoth, NORM},
    {"aten::linalg_vector_norm", 2, 3, 4, Types::kFloat, true, true, Saves::kBoth, NORM},
    {"aten::prod", -1, -1, 1, Types::kFloat, true, true, Saves::kOperand, PROD(true)},
    {"aten::prod.dim_int", 1, 2, 3, Types::kFloat, true, true, Saves::kOperand, PROD(false)},
};

// --- the rule ---

class SegmentRule final : public Rule {
 public:
  explicit SegmentRule(const SegmentOp& entry) : entry_(entry) {}

  bool saves() const override { return entry_.saves != Saves::kNothing; }
  bool reads(size_t) const override {
    return entry_.saves == Saves::kOperand || entry_.saves == Saves::kBoth;
  }
  bool reads_result(uint32_t) const override {
    return entry_.saves == Saves::kResult || entry_.saves == Saves::kBoth;
  }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0)) return false;
    const Value x = builder.operand(0);
    const Geometry& g = *x.geometry;
    // Eager mode supports at most 64 dimensions.
    if (!takes(x.dtype) || !keeps(builder, x) || g.dim() > 64) return false;
    const std::optional<Range> range = range_of(builder.arguments(), g.dim());
    if (!range.has_value() || range->inner(g) == 0) return false;
    if (!row_major(x) && !is_always_contiguous(*range, g)) return false;
    if (range->length(g) == 0 && (!entry_.empty || range->outer(g) == 0)) return false;
    if (!is_plain(builder, *range)) return false;
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(g.dim()) << 32 | static_cast<uint64_t>(range->first) << 16 |
                static_cast<uint64_t>(range->last));
    builder.key(static_cast<uint64_t>(has_any_inner(*range, g) ? g.sizes.back() : range->inner(g)));
    for (size_t i = 1; i < builder.num_arguments(); ++i) {
      if (static_cast<int>(i) != entry_.dims && !builder.constant(i)) return false;
    }
    add_results(builder, x, *range);
    return true;
  }

  void forward(Batch& batch) const override {
    const Segments s = segments(batch);
    std::vector<Tensor> outs;
    for (uint32_t k = 0; k < batch.node(0).num_values; ++k) {
      outs.push_back(batch.output_rows(k, s.inner));
    }
    entry_.forward(outs, rows(batch, s), s, batch.signature().arguments);
  }

  void backward(BackwardBatch& batch) const override {
    const Segments s = segments(batch);
    Tensor x;  // undefined if not needed, because the values may be freed
    std::vector<Tensor> results;
    if (reads(0)) x = rows(batch, s);
    if (entry_.saves == Saves::kResult || entry_.saves == Saves::kBoth) {
      for (uint32_t k = 0; k < batch.node(0).num_values; ++k) {
        results.push_back(batch.result_rows(k, s.inner));
      }
    }
    const Tensor g =
        entry_.backward(batch.grad_rows(0, s.inner), x, results, s, batch.signature().arguments);
    batch.add(0, s.moved ? rows_by_operand(batch, range(batch), g) : g);
  }

 private:
  bool takes(c10::ScalarType dtype) const {
    switch (entry_.types) {
      case Types::kAny:
        return true;
      case Types::kBool:
        return dtype == c10::kBool;
      case Types::kSum:
        return c10::isFloatingType(dtype) || c10::isIntegralType(dtype, true);
      default:
        return c10::isFloatingType(dtype);
    }
  }

  // Whether the `dtype` argument is None or the dtype of a floating-point operand. (If it is None,
  // sums of integers are int64.)
  bool keeps(const NodeBuilder& builder, const Value& x) const {
    if (entry_.dtype < 0) return true;
    const c10::IValue& dtype = builder.argument(static_cast<size_t>(entry_.dtype));
    return dtype.isNone() || (is_float(x) && dtype.toScalarType() == x.dtype);
  }

  // Whether eager's result is contiguous for any strides of the operand.
  bool is_always_contiguous(const Range& range, const Geometry& g) const {
    if (entry_.reduces) return g.dim() - (range.last - range.first) <= 1;
    const std::string_view op = entry_.op;
    return op == "aten::softmax.int" || op == "aten::log_softmax.int";
  }

  // Returns the range of dimensions of the call, or nothing if the dimensions are not adjacent.
  std::optional<Range> range_of(at::ArrayRef<c10::IValue> arguments, int64_t rank) const {
    std::vector<int64_t> dims;
    if (entry_.dims >= 0) {
      const c10::IValue& given = arguments[static_cast<size_t>(entry_.dims)];
      if (given.isInt()) dims.push_back(given.toInt());
      if (given.isIntList()) dims = given.toIntVector();
    }
    if (dims.empty()) return Range{0, rank};
    for (int64_t& d : dims) {
      if (d < 0) d += rank;
      if (d < 0 || d >= rank) return std::nullopt;  // eager raises the error
    }
    std::sort(dims.begin(), dims.end());
    for (size_t i = 1; i < dims.size(); ++i) {
      if (dims[i] != dims[i - 1] + 1) return std::nullopt;
    }
    return Range{dims.front(), dims.back() + 1};
  }

  // Whether the formulas above cover the arguments.
  bool is_plain(const NodeBuilder& builder, const Range& range) const {
    const std::string& name = builder.op().name;
    if (name == "aten::flip" || name == "aten::roll") {
      const bool one = builder.argument(static_cast<size_t>(entry_.dims)).toIntList().size() == 1;
      return one && (name == "aten::flip" || builder.argument(1).toIntList().size() == 1);
    }
    if (!entry_.reduces || name == "aten::prod.dim_int") return range.last == range.first + 1;
    if (name == "aten::argmax" || name == "aten::argmin") {
      return !(builder.argument(1).isNone() && builder.argument(2).toBool());
    }
    if (name.find("norm") == std::string::npos) return true;
    return builder.argument(1).isNone() || builder.argument(1).toScalar().equal(2);
  }

  void add_results(NodeBuilder& builder, const Value& x, const Range& range) const {
    at::DimVector sizes(x.geometry->sizes.begin(), x.geometry->sizes.end());
    if (entry_.reduces) {
      const bool keep =
          entry_.keepdim >= 0 && builder.argument(static_cast<size_t>(entry_.keepdim)).toBool();
      const auto first = sizes.begin() + range.first;
      const auto last = sizes.begin() + range.last;
      keep ? std::fill(first, last, 1) : (void)sizes.erase(first, last);
    }
    const bool counts = entry_.types == Types::kSum && !c10::isFloatingType(x.dtype);
    builder.result(sizes, counts || entry_.types == Types::kIndex ? at::kLong : x.dtype);
    const bool selects = std::string_view(entry_.op) == "aten::max.dim" ||
                         std::string_view(entry_.op) == "aten::min.dim";
    if (selects) builder.result(sizes, at::kLong);
  }

  // Whether instances of a batch may differ in their inner sizes (segment_rows.h).
  bool has_any_inner(const Range& range, const Geometry& g) const {
    return entry_.reduces && g.dim() - range.last > 1;
  }

  Range range(const BatchView& batch) const {
    return *range_of(batch.signature().arguments, batch.operand_value(0, 0).geometry->dim());
  }

  Tensor rows(BatchView& batch, const Segments& s) const {
    return s.moved ? rows_by_segment(batch, range(batch)) : batch.rows(0, s.inner);
  }

  Segments segments(const BatchView& batch) const {
    Segments s;
    const Range dims = range(batch);
    const auto inner = [&](int64_t m) { return dims.inner(*batch.operand_value(m, 0).geometry); };
    s.inner = inner(0);
    for (int64_t m = 1; m < batch.size(); ++m) s.moved |= inner(m) != s.inner;
    if (s.moved) s.inner = batch.operand_value(0, 0).geometry->sizes.back();
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Geometry& g = *batch.operand_value(m, 0).geometry;
      s.instances.push_back(dims.outer(g) * (dims.inner(g) / s.inner));
      s.counts.insert(s.counts.end(), static_cast<size_t>(s.instances.back()), dims.length(g));
    }
    s.equal =
        std::all_of(s.counts.begin(), s.counts.end(), [&](int64_t c) { return c == s.counts[0]; });
    return s;
  }

  const SegmentOp& entry_;
};

}  // namespace

RuleTable segment_rules() {
  RuleTable table;
  for (const SegmentOp& entry : kOps) table.push_back({entry.op, new SegmentRule(entry)});
  return table;
}

}  // namespace autobatch

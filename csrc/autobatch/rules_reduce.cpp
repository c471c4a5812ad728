// Sums and means. Over the leading dimensions (an instance's rows) instances of different lengths
// batch as segment sums; over other dimensions shapes must agree.
#include "autobatch/rules.h"

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

namespace autobatch {
namespace {

using at::Tensor;

// Which dimensions a call reduces: all, where `dims` is not given or empty.
std::vector<int64_t> reduced_dims(const c10::IValue& dims, int64_t rank) {
  std::vector<int64_t> out;
  if (dims.isIntList()) out = dims.toIntVector();
  if (out.empty()) {
    for (int64_t d = 0; d < rank; ++d) out.push_back(d);
  }
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

// sum(x, dtype), sum.dim_IntList(x, dims, keepdim, dtype); mean likewise.
struct Reduction {
  const char* op;
  bool mean;
  int dims;     // argument, or -1: all
  int keepdim;  // argument, or -1: no
  size_t dtype;
};

const Reduction kReductions[] = {
    {"aten::sum", false, -1, -1, 1},
    {"aten::sum.dim_IntList", false, 1, 2, 3},
    {"aten::mean", true, -1, -1, 1},
    {"aten::mean.dim", true, 1, 2, 3},
};

struct Plan {
  std::vector<int64_t> dims;
  bool keepdim = false;
};

template <class Arguments>
Plan plan_of(const Reduction& entry, const Arguments& argument, int64_t rank) {
  Plan plan;
  plan.dims = reduced_dims(entry.dims < 0 ? c10::IValue() : argument(entry.dims), rank);
  plan.keepdim = entry.keepdim >= 0 && argument(entry.keepdim).toBool();
  return plan;
}

// Over the first dimensions: rows [k, inner] of each instance become one.
class LeadingRule final : public Rule {
 public:
  explicit LeadingRule(const Reduction& entry) : entry_(entry) {}

  bool saves() const override { return false; }

  bool capture(Draft& draft) const override {
    if (!draft.argument(entry_.dtype).isNone()) return false;
    const Value x = draft.operand(0);
    const Geometry& g = *x.geometry;
    if (!is_float(x) || !row_major(x) || g.numel == 0) return false;
    const Plan plan = plan_of(entry_, [&](size_t i) { return draft.argument(i); }, g.dim());
    if (!valid(plan.dims, g.dim())) return false;
    if (!plan.dims.empty() && plan.dims.back() + 1 != static_cast<int64_t>(plan.dims.size())) {
      return false;
    }
    const at::DimVector sizes = reduced_sizes(g.sizes, plan.dims, plan.keepdim);
    draft.key(dtype_word(x));
    draft.key(static_cast<uint64_t>(c10::multiply_integers(sizes)));
    draft.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t inner = batch.result_value(0, 0).geometry->numel;
    Tensor out = batch.output_rows(0, inner);
    const Tensor x = batch.rows(0, inner);
    const int64_t n = batch.size();
    const std::vector<int64_t> counts = rows_of(batch, inner);
    if (x.size(0) == n * counts[0] && is_constant(counts)) {
      const Tensor stacked = x.view({n, counts[0], inner});
      entry_.mean ? at::mean_out(out, stacked, 1) : at::sum_out(out, stacked, 1);
      return;
    }
    segment_sum(x, counts, out);
    if (entry_.mean) out.div_(divisors(counts, out));
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t inner = batch.result_value(0, 0).geometry->numel;
    const std::vector<int64_t> counts = rows_of(batch, inner);
    Tensor g = batch.grad_rows(0, inner);
    if (entry_.mean) g = g / divisors(counts, g);
    if (is_constant(counts)) {
      batch.add(0, g.unsqueeze(1).expand({batch.size(), counts[0], inner}));
    } else {
      batch.add(0, repeat_rows(g, counts));
    }
  }

 private:
  static std::vector<int64_t> rows_of(const BatchView& batch, int64_t inner) {
    std::vector<int64_t> counts;
    for (int64_t m = 0; m < batch.size(); ++m) {
      counts.push_back(batch.operand_value(m, 0).geometry->numel / inner);
    }
    return counts;
  }
  static bool is_constant(const std::vector<int64_t>& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](int64_t c) { return c == counts[0]; });
  }
  static Tensor divisors(const std::vector<int64_t>& counts, const Tensor& like) {
    return at::tensor(counts, at::TensorOptions().dtype(at::kLong)).to(like.options()).unsqueeze(1);
  }

  const Reduction& entry_;
};

// Over any dimensions of instances of one shape.
class AnyDimsRule final : public Rule {
 public:
  explicit AnyDimsRule(const Reduction& entry) : entry_(entry) {}

  bool saves() const override { return false; }

  bool capture(Draft& draft) const override {
    if (entry_.dims < 0 || !draft.argument(entry_.dtype).isNone()) return false;
    const Value x = draft.operand(0);
    const Geometry& g = *x.geometry;
    if (!is_float(x) || !row_major(x) || g.numel == 0) return false;
    const Plan plan = plan_of(entry_, [&](size_t i) { return draft.argument(i); }, g.dim());
    if (!valid(plan.dims, g.dim()) || !draft.constant(entry_.dims)) return false;
    draft.key(plan.keepdim ? 1 : 0);
    draft.key(dtype_word(x));
    draft.key(g.canonical);
    draft.result(reduced_sizes(g.sizes, plan.dims, plan.keepdim), x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output_stacked(0);
    const Plan plan = plan_for(batch);
    const Tensor x = batch.stacked(0);
    entry_.mean ? at::mean_out(out, x, plan.dims, plan.keepdim)
                : at::sum_out(out, x, plan.dims, plan.keepdim);
  }

  void backward(BackwardBatch& batch) const override {
    const Plan plan = plan_for(batch);
    Tensor g = batch.grad_stacked(0);
    at::DimVector sizes{batch.size()};
    const auto& each = batch.operand_value(0, 0).geometry->sizes;
    sizes.append(each.begin(), each.end());
    int64_t count = 1;
    for (int64_t d : plan.dims) {
      if (!plan.keepdim) g = g.unsqueeze(d);
      count *= sizes[d];
    }
    if (entry_.mean) g = g / count;
    batch.add(0, g.expand(sizes));
  }

 private:
  // In the stacked operand, whose dimensions are one further back.
  Plan plan_for(const BatchView& batch) const {
    Plan plan = plan_of(
        entry_, [&](size_t i) { return batch.argument(i); },
        batch.operand_value(0, 0).geometry->dim());
    for (int64_t& d : plan.dims) ++d;
    return plan;
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

// Over the last dimension instances of any length batch as rows; over others shapes must agree.
class SoftmaxRule final : public Rule {
 public:
  explicit SoftmaxRule(const Softmax& entry) : entry_(entry) {}

  bool capture(Draft& draft) const override {
    if (!draft.argument(2).isNone()) return false;
    const Value x = draft.operand(0);
    const Geometry& g = *x.geometry;
    if (!is_float(x) || !row_major(x) || g.numel == 0 || g.dim() == 0) return false;
    const int64_t dim = wrapped(draft.argument(1).toInt(), g.dim());
    if (dim < 0 || dim >= g.dim()) {
      draft.leave_to_eager();
      return false;
    }
    draft.key(dtype_word(x));
    // Forward reads the dimension out of the first node's arguments: its meaning needs the rank.
    draft.key(static_cast<uint64_t>(g.dim()) << 32 | static_cast<uint64_t>(dim));
    if (dim == g.dim() - 1) {
      draft.key(static_cast<uint64_t>(g.sizes.back()));
    } else {
      draft.key(g.canonical);
    }
    draft.result(g.canonical, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Geometry& g = *batch.result_value(0, 0).geometry;
    const int64_t dim = wrapped(batch.argument(1).toInt(), g.dim());
    if (dim == g.dim() - 1) {
      Tensor out = batch.output_rows(0, g.sizes.back());
      entry_.forward(out, batch.rows(0, g.sizes.back()), 1, false);
    } else {
      Tensor out = batch.output_stacked(0);
      entry_.forward(out, batch.stacked(0), dim + 1, false);
    }
  }

  void backward(BackwardBatch& batch) const override {
    const Value& y = batch.result_value(0, 0);
    const int64_t dim = wrapped(batch.argument(1).toInt(), y.geometry->dim());
    const int64_t width = y.geometry->sizes.back();
    if (dim == y.geometry->dim() - 1) {
      batch.add(
          0, entry_.backward(batch.grad_rows(0, width), batch.result_rows(0, width), 1, y.dtype));
    } else {
      batch.add(0,
                entry_.backward(batch.grad_stacked(0), batch.result_stacked(0), dim + 1, y.dtype));
    }
  }

 private:
  static int64_t wrapped(int64_t dim, int64_t rank) { return dim < 0 ? dim + rank : dim; }

  const Softmax& entry_;
};

}  // namespace

RuleTable reduce_rules() {
  RuleTable table;
  for (const Reduction& entry : kReductions) {
    table.push_back({entry.op, new LeadingRule(entry)});
    table.push_back({entry.op, new AnyDimsRule(entry)});
  }
  for (const Softmax& entry : kSoftmax) table.push_back({entry.op, new SoftmaxRule(entry)});
  return table;
}

}  // namespace autobatch

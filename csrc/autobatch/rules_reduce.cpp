// Sums and means over dimensions that do not lie side by side, of instances of one shape (others:
// rules_segment.cpp); softmax over the last dimension, of instances of any number of rows.
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

// Over the last dimension: rows of one width.
class SoftmaxRule final : public Rule {
 public:
  explicit SoftmaxRule(const Softmax& entry) : entry_(entry) {}

  bool capture(Draft& draft) const override {
    if (!draft.argument(2).isNone()) return false;
    const Value x = draft.operand(0);
    const Geometry& g = *x.geometry;
    if (!is_float(x) || !row_major(x) || g.dim() == 0) return false;
    const int64_t dim = wrapped(draft.argument(1).toInt(), g.dim());
    if (dim < 0 || dim >= g.dim()) {
      draft.leave_to_eager();
      return false;
    }
    if (g.dim() == 1 || dim != g.dim() - 1 || g.sizes.back() == 0) return false;
    draft.key(dtype_word(x));
    // The call's arguments name the dimension: its meaning needs the rank.
    draft.key(static_cast<uint64_t>(g.dim()) << 32 | static_cast<uint64_t>(dim));
    draft.key(static_cast<uint64_t>(g.sizes.back()));
    draft.result(g.canonical, x.dtype);
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

}  // namespace

RuleTable reduce_rules() {
  RuleTable table;
  for (const Softmax& entry : kSoftmax) table.push_back({entry.op, new SoftmaxRule(entry)});
  for (const RuleEntry& entry : segment_rules()) table.push_back(entry);
  for (const Reduction& entry : kReductions) table.push_back({entry.op, new AnyDimsRule(entry)});
  return table;
}

}  // namespace autobatch

// One call over the rows of all instances, and the rule of any elementwise op.
#include "autobatch/rules/rowwise.h"

#include "autobatch/common/pool.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string_view>

namespace autobatch {

using at::Tensor;
using torch::jit::Stack;

namespace {

bool needs_gradient(const BatchView& batch, size_t slot) {
  for (int64_t m = 0; m < batch.size(); ++m) {
    if (batch.operand_value(m, slot).requires_grad) return true;
  }
  return false;
}

}  // namespace

// --- the call ---

LocalGraph RowsCall::call(BatchView& batch, bool record) const {
  const at::AutoGradMode grad_mode(record);
  LocalGraph graph;
  for (size_t s = 0; s < batch.num_operands(); ++s) {
    if (!batch.given(s)) {
      graph.inputs.emplace_back();
      continue;
    }
    graph.inputs.push_back(leaf(operand(batch, s), record && needs_gradient(batch, s)));
  }
  const Signature& signature = batch.signature();
  Stack stack = rebuild(signature, graph.inputs);
  adjust(batch, stack);
  signature.op->handle.callBoxed(stack);
  graph.outputs = results_of(stack);
  return graph;
}

void RowsCall::forward(Batch& batch) const {
  LocalGraph graph = call(batch, batch.needs_grad());
  put(batch, graph);
  if (batch.needs_grad()) batch.record().local.push_back(std::move(graph));
}

void RowsCall::put(Batch& batch, const LocalGraph& graph) const {
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    Tensor out = batch.output(k);
    const Tensor& result = graph.outputs[k];
    TORCH_INTERNAL_ASSERT(result.numel() == out.numel() &&
                          result.scalar_type() == out.scalar_type());
    out.view(result.sizes()).copy_(result.detach());
  }
}

std::vector<Tensor> RowsCall::gradients(BackwardBatch& batch, const LocalGraph& graph) const {
  std::vector<Tensor> out;
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    const Tensor& result = graph.outputs[k];
    out.push_back(result.requires_grad() ? batch.grad_flat(k).view(result.sizes()) : Tensor());
  }
  return out;
}

void RowsCall::backward(BackwardBatch& batch) const {
  if (batch.record().local.empty()) return loop_rule().backward(batch);
  const LocalGraph* graph = &batch.record().local.front();
  LocalGraph again;
  if (!batch.complete()) {  // rows without a gradient must not take part: 0 * NaN is NaN
    batch.check_unwritten();
    const ContextGuard context(batch.signature().context);
    again = call(batch, true);
    graph = &again;
  }
  const std::vector<Tensor> grads = differentiate(*graph, gradients(batch, *graph));
  for (size_t s = 0; s < grads.size(); ++s) {
    if (grads[s].defined() && batch.needs(s)) add_gradient(batch, s, grads[s]);
  }
}

// --- broadcasting over rows ---

bool row_major_or_expanded(const Geometry& g) {
  int64_t least = 1;
  for (int64_t d = g.dim() - 1; d >= 0; --d) {
    if (g.sizes[d] == 1 || g.strides[d] == 0) continue;
    if (g.strides[d] < least) return false;
    least = g.strides[d] * g.sizes[d];
  }
  return true;
}

bool repeats_along(const Geometry& small, at::IntArrayRef large) {
  if (small.sizes == large) return true;
  if (small.dim() > static_cast<int64_t>(large.size()) || small.numel == 0) return false;
  size_t first = 0;
  while (first < small.sizes.size() && small.sizes[first] == 1) ++first;
  const size_t shift = large.size() - small.sizes.size();
  for (size_t d = first; d < small.sizes.size(); ++d) {
    if (small.sizes[d] != large[d + shift]) return false;
  }
  return true;
}

namespace {

// Size of dimension `d` of a result of `rank` in the operand, 1 where it has none.
int64_t aligned_size(const Geometry& g, size_t rank, size_t d) {
  const size_t missing = rank - g.sizes.size();
  return d < missing ? 1 : g.sizes[d - missing];
}

}  // namespace

Spread spread_of(at::ArrayRef<const Geometry*> operands, at::IntArrayRef sizes) {
  bool elements = true, rows = !sizes.empty();
  for (const Geometry* g : operands) {
    elements = elements && repeats_along(*g, sizes);
    for (size_t d = 1; d < sizes.size(); ++d) {
      // One row of [T, d] * [T, 1] is no other case than many: all but the first size tell.
      if (g->sizes.size() == sizes.size() && g->sizes[d] != sizes[d]) elements = false;
      rows = rows && aligned_size(*g, sizes.size(), d) != 0;
    }
  }
  return elements ? Spread::kElements : rows ? Spread::kRows : Spread::kNone;
}

void add_spread_key(Draft& draft, Spread spread, at::ArrayRef<const Geometry*> operands,
                    at::IntArrayRef sizes) {
  draft.key(static_cast<uint64_t>(spread) << 32 | sizes.size());
  for (const Geometry* g : operands) {
    draft.key(g->sizes.size());
    if (spread != Spread::kRows) continue;
    for (size_t d = 1; d < sizes.size(); ++d) {
      draft.key(static_cast<uint64_t>(aligned_size(*g, sizes.size(), d)));
    }
  }
}

bool one_value(const BatchView& batch, size_t slot) {
  if (batch.size() > 1 && &batch.node(0) == &batch.node(1)) {
    // In a body the numbers are the same for all members: where the values lie tells.
    return batch.operand_region(0, slot).offset == batch.operand_region(1, slot).offset;
  }
  const ValueId first = batch.operand(0, slot);
  for (int64_t m = 1; m < batch.size(); ++m) {
    if (batch.operand(m, slot) != first) return false;
  }
  return true;
}

namespace {

// The sizes of a row of the operand, aligned with the result's.
at::DimVector row_sizes(const BatchView& batch, size_t slot) {
  const size_t rank = batch.result_value(0, 0).geometry->sizes.size();
  at::DimVector sizes;
  for (size_t d = 1; d < rank; ++d) {
    sizes.push_back(aligned_size(*batch.operand_value(0, slot).geometry, rank, d));
  }
  return sizes;
}

// How often each row of the operand stands in the call: once, or for all rows of its member.
Counts row_counts(const BatchView& batch, size_t slot) {
  Counts counts;
  for (int64_t m = 0; m < batch.size(); ++m) {
    const auto& result = batch.result_value(m, 0).geometry->sizes;
    const int64_t own = aligned_size(*batch.operand_value(m, slot).geometry, result.size(), 0);
    if (own == result[0]) {
      counts.insert(counts.end(), static_cast<size_t>(own), 1);
    } else {
      counts.push_back(result[0]);
    }
  }
  return counts;
}

// Its backward makes the gradient of each operand as large as that, before it is told of the
// others.
constexpr std::string_view kNeverBroadcastsFirst = "aten::_prelu_kernel";

// Whether the call has the operand once, for all members, where it is one thing in all of them. If
// all operands are, the first stands there for each member: the result has a row for each.
template <class IsOne>
bool stands_once(const BatchView& batch, size_t slot, const IsOne& is_one) {
  if (!is_one(slot)) return false;
  if (slot != 0 || batch.size() == 1) return true;
  if (batch.signature().op->name == kNeverBroadcastsFirst) return false;
  for (size_t other = 1; other < batch.num_operands(); ++other) {
    if (!is_one(other)) return true;
  }
  return false;
}

bool is_one_row(const BatchView& batch, size_t slot) {
  const size_t rank = batch.result_value(0, 0).geometry->sizes.size();
  return stands_once(batch, slot, [&](size_t s) {
    return one_value(batch, s) && aligned_size(*batch.operand_value(0, s).geometry, rank, 0) == 1;
  });
}

}  // namespace

at::DimVector spread_sizes(const BatchView& batch, size_t slot) {
  at::DimVector sizes = row_sizes(batch, slot);
  int64_t rows = 0;
  for (int64_t m = 0; m < batch.size(); ++m) rows += batch.result_value(m, 0).geometry->sizes[0];
  sizes.insert(sizes.begin(), is_one_row(batch, slot) ? 1 : rows);
  return sizes;
}

Tensor spread_rows(BatchView& batch, size_t slot) {
  at::DimVector sizes = row_sizes(batch, slot);
  const int64_t width = c10::multiply_integers(sizes);
  if (is_one_row(batch, slot)) {
    sizes.insert(sizes.begin(), 1);
    return batch.single(slot).reshape(sizes);
  }
  const Tensor rows = repeat_rows(batch.rows(slot, width), row_counts(batch, slot));
  sizes.insert(sizes.begin(), rows.size(0));
  return rows.view(sizes);
}

void add_spread_rows(BackwardBatch& batch, size_t slot, const Tensor& gradient) {
  if (is_one_row(batch, slot)) return batch.add_single(slot, gradient);
  const Counts counts = row_counts(batch, slot);
  const auto repeated = [](int64_t c) { return c != 1; };
  if (std::none_of(counts.begin(), counts.end(), repeated)) return batch.add(slot, gradient);
  const Tensor rows = gradient.reshape({gradient.size(0), -1});
  Tensor sums = pooled_empty({static_cast<int64_t>(counts.size()), rows.size(1)}, rows.options());
  segment_sum(rows, counts, sums);
  batch.add(slot, sums);
}

namespace {

// --- elementwise ops ---

// Elementwise, and not tagged so.
constexpr const char* kUntagged[] = {"aten::hardswish",
                                     "aten::log_sigmoid",
                                     "aten::_prelu_kernel",
                                     "aten::where.ScalarOther",
                                     "aten::where.ScalarSelf",
                                     "aten::where.Scalar",
                                     "aten::absolute",
                                     "aten::isreal",
                                     "aten::masked_fill.Tensor",
                                     "aten::greater.Tensor",
                                     "aten::less.Tensor",
                                     "aten::multiply.Tensor",
                                     "aten::divide.Tensor",
                                     "aten::subtract.Tensor",
                                     "aten::arctan",
                                     "aten::arctan2"};

// Any op that PyTorch tags as elementwise: of tensors, and constants.
class PointwiseRule final : public RowsCall {
 public:
  bool capture(Draft& draft) const override {
    for (size_t i = 0; i < draft.num_arguments(); ++i) {
      if (draft.is_tensor(i)) {
        if (draft.tensor(i).unsafeGetTensorImpl()->is_wrapped_number()) {
          draft.number(i);
          continue;
        }
        const Value x = draft.operand(i);
        if (!row_major_or_expanded(*x.geometry)) return false;
        draft.key(dtype_word(x) << 1 | (x.requires_grad ? 1 : 0));
      } else if (draft.argument(i).isTensorList() || !draft.constant(i)) {
        return false;
      }
    }
    if (draft.operands().empty()) return false;
    const auto operands = geometries(draft);
    const std::optional<std::vector<int64_t>> sizes = broadcast(operands);
    if (!sizes.has_value() || promotes(draft, *sizes)) return false;
    const Spread spread = spread_of(operands, *sizes);
    if (spread == Spread::kNone) return false;
    add_spread_key(draft, spread, operands, *sizes);
    return true;
  }

  const Geometry* geometry_of(Draft& draft, const Geometry*) const override {
    return draft.graph().geometries().intern_contiguous(*broadcast(geometries(draft)));
  }

 protected:
  Tensor operand(BatchView& batch, size_t slot) const override {
    if (by_rows(batch)) return spread_rows(batch, slot);
    return is_one_element(batch, slot) ? batch.single(slot).reshape({1})
                                       : batch.flat_repeated(slot);
  }

  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    if (by_rows(batch)) return add_spread_rows(batch, slot, grad);
    is_one_element(batch, slot) ? batch.add_single(slot, grad) : batch.add_repeated(slot, grad);
  }

 private:
  using Geometries = c10::SmallVector<const Geometry*, 4>;

  static Geometries geometries(const Draft& draft) {
    Geometries out;
    for (size_t s = 0; s < draft.operands().size(); ++s) {
      out.push_back(draft.operand_value(s).geometry);
    }
    return out;
  }

  static std::optional<std::vector<int64_t>> broadcast(const Geometries& operands) {
    std::vector<int64_t> sizes = operands[0]->sizes;
    for (size_t s = 1; s < operands.size(); ++s) {
      if (sizes == operands[s]->sizes) continue;
      if (!at::are_expandable(sizes, operands[s]->sizes)) return std::nullopt;
      sizes = at::infer_size(sizes, operands[s]->sizes);
    }
    return sizes;
  }

  // A tensor without dimensions takes less part in the choice of the result's type than others.
  static bool promotes(const Draft& draft, const std::vector<int64_t>& sizes) {
    const c10::ScalarType first = draft.operand_value(0).dtype;
    bool scalar = false, mixed = false;
    for (size_t s = 0; s < draft.operands().size(); ++s) {
      scalar = scalar || draft.operand_value(s).geometry->sizes.empty();
      mixed = mixed || draft.operand_value(s).dtype != first;
    }
    return mixed && scalar && !sizes.empty();
  }

  static bool by_rows(const BatchView& batch) {
    Geometries operands;
    for (size_t s = 0; s < batch.num_operands(); ++s) {
      operands.push_back(batch.operand_value(0, s).geometry);
    }
    return spread_of(operands, batch.result_value(0, 0).geometry->sizes) == Spread::kRows;
  }

  static bool is_one_element(const BatchView& batch, size_t slot) {
    return batch.num_operands() > 1 && stands_once(batch, slot, [&](size_t s) {
             return batch.operand_value(0, s).geometry->numel == 1 && one_value(batch, s);
           });
  }
};

}  // namespace

const Rule& pointwise_rule() {
  static const PointwiseRule rule;
  return rule;
}

RuleTable row_rules() {
  RuleTable table;
  for (const char* op : kUntagged) table.push_back({op, &pointwise_rule()});
  return table;
}

}  // namespace autobatch

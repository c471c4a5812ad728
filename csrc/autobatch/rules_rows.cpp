// Ops that work row by row, of instances of any number of rows: any elementwise op, and whatever
// looks at trailing dimensions alone.
#include "autobatch/rules_rows.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/GradMode.h>

#include <algorithm>

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

bool is_one_row(const BatchView& batch, size_t slot) {
  const size_t rank = batch.result_value(0, 0).geometry->sizes.size();
  return one_value(batch, slot) &&
         aligned_size(*batch.operand_value(0, slot).geometry, rank, 0) == 1;
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
  Tensor sums = at::empty({static_cast<int64_t>(counts.size()), rows.size(1)}, rows.options());
  segment_sum(rows, counts, sums);
  batch.add(slot, sums);
}

namespace {

// --- elementwise ops ---

// Elementwise, and not tagged so.
constexpr const char* kUntagged[] = {"aten::hardswish",       "aten::log_sigmoid",
                                     "aten::where.ScalarOther", "aten::where.ScalarSelf",
                                     "aten::where.Scalar",    "aten::absolute",
                                     "aten::isreal",          "aten::masked_fill.Tensor",
                                     "aten::greater.Tensor",  "aten::less.Tensor",
                                     "aten::multiply.Tensor", "aten::divide.Tensor",
                                     "aten::subtract.Tensor", "aten::square",
                                     "aten::arctan",          "aten::arctan2"};

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
    const std::optional<at::DimVector> sizes = broadcast(operands);
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

  static std::optional<at::DimVector> broadcast(const Geometries& operands) {
    at::DimVector sizes(operands[0]->sizes.begin(), operands[0]->sizes.end());
    for (size_t s = 1; s < operands.size(); ++s) {
      if (sizes == at::IntArrayRef(operands[s]->sizes)) continue;
      if (!at::are_expandable(sizes, operands[s]->sizes)) return std::nullopt;
      sizes = at::infer_size_dimvector(sizes, operands[s]->sizes);
    }
    return sizes;
  }

  // A tensor without dimensions takes less part in the choice of the result's type than others.
  static bool promotes(const Draft& draft, const at::DimVector& sizes) {
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
    return batch.num_operands() > 1 && batch.operand_value(0, slot).geometry->numel == 1 &&
           one_value(batch, slot);
  }
};

// --- ops on trailing dimensions ---

// How many of the last dimensions of argument 0 an op looks at.
enum class Tail : uint8_t {
  kDim,    // from dimension `argument` on
  kDims,   // from the first of a list of dimensions on
  kShape,  // as many as the list has
  kTwo,    // two
};

struct TailOp {
  const char* op;
  Tail tail;
  size_t argument;
};

const TailOp kTailOps[] = {
    {"aten::layer_norm", Tail::kShape, 1},
    {"aten::rms_norm", Tail::kShape, 1},
    {"aten::softmax.int", Tail::kDim, 1},
    {"aten::log_softmax.int", Tail::kDim, 1},
    {"aten::glu", Tail::kDim, 1},
    {"aten::flip", Tail::kDims, 1},
    {"aten::roll", Tail::kDims, 2},
    {"aten::sum.dim_IntList", Tail::kDims, 1},
    {"aten::mean.dim", Tail::kDims, 1},
    {"aten::nansum", Tail::kDims, 1},
    {"aten::prod.dim_int", Tail::kDim, 1},
    {"aten::amax", Tail::kDims, 1},
    {"aten::amin", Tail::kDims, 1},
    {"aten::max.dim", Tail::kDim, 1},
    {"aten::min.dim", Tail::kDim, 1},
    {"aten::argmax", Tail::kDim, 1},
    {"aten::argmin", Tail::kDim, 1},
    {"aten::any.dim", Tail::kDim, 1},
    {"aten::all.dim", Tail::kDim, 1},
    {"aten::count_nonzero.dim_IntList", Tail::kDims, 1},
    {"aten::logsumexp", Tail::kDims, 1},
    {"aten::var.dim", Tail::kDims, 1},
    {"aten::var.correction", Tail::kDims, 1},
    {"aten::std.dim", Tail::kDims, 1},
    {"aten::std.correction", Tail::kDims, 1},
    {"aten::var_mean.correction", Tail::kDims, 1},
    {"aten::std_mean.correction", Tail::kDims, 1},
    {"aten::norm.ScalarOpt_dim", Tail::kDims, 2},
    {"aten::norm.ScalarOpt_dim_dtype", Tail::kDims, 2},
    {"aten::linalg_vector_norm", Tail::kDims, 2},
    {"aten::cosine_similarity", Tail::kDim, 2},
    {"aten::cumsum", Tail::kDim, 1},
    {"aten::cumprod", Tail::kDim, 1},
    {"aten::logcumsumexp", Tail::kDim, 1},
    {"aten::cummax", Tail::kDim, 1},
    {"aten::cummin", Tail::kDim, 1},
    {"aten::diff", Tail::kDim, 2},
    {"aten::sort", Tail::kDim, 1},
    {"aten::sort.stable", Tail::kDim, 2},
    {"aten::argsort", Tail::kDim, 1},
    {"aten::topk", Tail::kDim, 2},
    {"aten::kthvalue", Tail::kDim, 2},
    {"aten::median.dim", Tail::kDim, 1},
    {"aten::gather", Tail::kDim, 1},
    {"aten::linalg_cross", Tail::kDim, 2},
    {"aten::tril", Tail::kTwo, 0},
    {"aten::triu", Tail::kTwo, 0},
};

class TailRule final : public RowsCall {
 public:
  explicit TailRule(const TailOp& entry) : entry_(entry) {}

  bool capture(Draft& draft) const override {
    if (!draft.is_tensor(0)) return false;
    const Geometry& x = *graph_value(draft, 0).geometry;
    const int64_t rank = x.dim();
    const int64_t leading = rank - tail_of(draft.argument(entry_.argument), rank);
    if (leading <= 0 || leading >= rank) return false;
    for (size_t i = 0; i < draft.num_arguments(); ++i) {
      if (!capture_argument(draft, i, x, leading)) return false;
    }
    draft.key(static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(leading));
    return true;
  }

  const Geometry* geometry_of(Draft& draft, const Geometry* inferred) const override {
    const Geometry& x = *draft.operand_value(0).geometry;
    const int64_t leading = x.dim() - tail_of(draft.argument(entry_.argument), x.dim());
    if (inferred->dim() < leading) return nullptr;
    at::DimVector sizes(x.sizes.begin(), x.sizes.begin() + leading);
    sizes.append(inferred->sizes.begin() + leading, inferred->sizes.end());
    return draft.graph().geometries().intern_contiguous(sizes);
  }

 protected:
  Tensor operand(BatchView& batch, size_t slot) const override {
    if (is_weight(batch, slot)) return batch.single(slot);
    const auto& each = batch.operand_value(0, slot).geometry->sizes;
    at::DimVector sizes(each.begin() + leading_of(batch), each.end());
    const Tensor rows = batch.rows(slot, c10::multiply_integers(sizes));
    sizes.insert(sizes.begin(), rows.size(0));
    return rows.view(sizes);
  }

  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    is_weight(batch, slot) ? batch.add_single(slot, grad) : batch.add(slot, grad);
  }

  // Dimensions counted from the end: there are others in front of them.
  void adjust(const BatchView& batch, Stack& arguments) const override {
    if (entry_.tail != Tail::kDim && entry_.tail != Tail::kDims) return;
    c10::IValue& value = arguments[entry_.argument];
    const int64_t rank = batch.operand_value(0, 0).geometry->dim();
    const auto from_end = [&](int64_t d) { return d < 0 ? d : d - rank; };
    if (value.isInt()) {
      value = from_end(value.toInt());
      return;
    }
    c10::List<int64_t> dims;
    for (int64_t d : value.toIntVector()) dims.push_back(from_end(d));
    value = dims;
  }

 private:
  static Value graph_value(Draft& draft, size_t i) {
    return draft.graph().value(draft.graph().value_of(draft.tensor(i)));
  }

  // 0 if it can't be told; the whole rank or more if the op looks at all dimensions.
  int64_t tail_of(const c10::IValue& argument, int64_t rank) const {
    const auto from = [&](int64_t d) { return d < 0 ? -d : rank - d; };
    switch (entry_.tail) {
      case Tail::kTwo:
        return 2;
      case Tail::kDim:
        return argument.isInt() ? from(argument.toInt()) : 0;
      default:
        break;
    }
    if (!argument.isIntList() || argument.toIntList().empty()) return 0;
    const auto list = argument.toIntVector();
    if (entry_.tail == Tail::kShape) return static_cast<int64_t>(list.size());
    int64_t tail = 0;
    for (int64_t d : list) {
      if (from(d) < 1) return 0;  // eager raises the error
      tail = std::max(tail, from(d));
    }
    return tail;
  }

  bool capture_argument(Draft& draft, size_t i, const Geometry& x, int64_t leading) const {
    const c10::IValue& argument = draft.argument(i);
    const bool dims = entry_.tail == Tail::kDim || entry_.tail == Tail::kDims;
    if (dims && i == entry_.argument) {
      const auto list =
          argument.isInt() ? std::vector<int64_t>{argument.toInt()} : argument.toIntVector();
      draft.key(list.size());
      for (int64_t d : list) draft.key(static_cast<uint64_t>(d < 0 ? d + x.dim() : d));
      return true;
    }
    if (!argument.isTensor()) return !argument.isTensorList() && draft.constant(i);
    if (!draft.is_tensor(i)) {
      draft.absent(i);
      return true;
    }
    const bool weight = (draft.op().weight_arguments >> i & 1) != 0;
    if (weight && draft.is_computed(i)) return false;
    const Value value = weight ? draft.weight(i) : draft.operand(i);
    draft.key(dtype_word(value) << 1 | (value.requires_grad ? 1 : 0));
    return weight || add_row(draft, *value.geometry, x, leading);
  }

  // The same leading dimensions; the others go into the key.
  static bool add_row(Draft& draft, const Geometry& g, const Geometry& x, int64_t leading) {
    if (!g.canonical->contiguous || g.dim() != x.dim()) return false;
    for (int64_t d = 0; d < g.dim(); ++d) {
      if (d < leading && g.sizes[d] != x.sizes[d]) return false;
      if (d >= leading && g.sizes[d] == 0) return false;
      if (d >= leading) draft.key(static_cast<uint64_t>(g.sizes[d]));
    }
    return true;
  }

  int64_t leading_of(const BatchView& batch) const {
    const int64_t rank = batch.operand_value(0, 0).geometry->dim();
    return rank - tail_of(batch.argument(entry_.argument), rank);
  }

  static bool is_weight(const BatchView& batch, size_t slot) {
    const uint32_t argument = batch.signature().slots[slot].argument;
    return (batch.signature().op->weight_arguments >> argument & 1) != 0;
  }

  const TailOp& entry_;
};

}  // namespace

const Rule& pointwise_rule() {
  static const PointwiseRule rule;
  return rule;
}

RuleTable row_rules() {
  RuleTable table;
  for (const char* op : kUntagged) table.push_back({op, &pointwise_rule()});
  for (const TailOp& entry : kTailOps) table.push_back({entry.op, new TailRule(entry)});
  return table;
}

}  // namespace autobatch

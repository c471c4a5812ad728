// Ops that work on trailing dimensions only, for instances with any number of rows.
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/rowwise.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace autobatch {
namespace {

using at::Tensor;
using torch::jit::Stack;

// Which trailing dimensions of argument 0 an op works on.
enum class Tail : uint8_t {
  kDim,     // the dimension in `argument` and all later ones
  kDims,    // the first dimension of the list in `argument` and all later ones
  kShape,   // one dimension for each element of the list in `argument`
  kMatrix,  // the last two dimensions, which are matrices
};

struct TailOp {
  const char* op;
  Tail tail;
  size_t argument = 0;
  bool repeats = false;  // whether argument 1 can be one matrix for all matrices of an instance
};

const TailOp kTailOps[] = {
    {"aten::layer_norm", Tail::kShape, 1},
    {"aten::rms_norm", Tail::kShape, 1},
    {"aten::softmax.int", Tail::kDim, 1},
    {"aten::log_softmax.int", Tail::kDim, 1},
    {"aten::flip", Tail::kDims, 1},
    {"aten::roll", Tail::kDims, 2},
    {"aten::sum.dim_IntList", Tail::kDims, 1},
    {"aten::mean.dim", Tail::kDims, 1},
    {"aten::nansum", Tail::kDims, 1},
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
    {"aten::linalg_cross", Tail::kDim, 2},
    {"aten::linalg_matrix_norm", Tail::kDims, 2},
    {"aten::linalg_matrix_norm.str_ord", Tail::kDims, 2},
    {"aten::linalg_cholesky", Tail::kMatrix},
    {"aten::linalg_cholesky_ex", Tail::kMatrix},
    {"aten::cholesky", Tail::kMatrix},
    {"aten::cholesky_solve", Tail::kMatrix},
    {"aten::cholesky_inverse", Tail::kMatrix},
    {"aten::linalg_solve_triangular", Tail::kMatrix, 0, /*repeats=*/true},
    {"aten::triangular_solve", Tail::kMatrix},
    {"aten::linalg_solve", Tail::kMatrix},
    {"aten::linalg_solve_ex", Tail::kMatrix},
    {"aten::linalg_inv", Tail::kMatrix},
    {"aten::linalg_inv_ex", Tail::kMatrix},
    {"aten::inverse", Tail::kMatrix},
    {"aten::linalg_pinv.atol_rtol_tensor", Tail::kMatrix},
    {"aten::pinverse", Tail::kMatrix},
    {"aten::linalg_det", Tail::kMatrix},
    {"aten::det", Tail::kMatrix},
    {"aten::logdet", Tail::kMatrix},
    {"aten::linalg_slogdet", Tail::kMatrix},
    {"aten::slogdet", Tail::kMatrix},
    {"aten::linalg_eigh", Tail::kMatrix},
    {"aten::linalg_eigvalsh", Tail::kMatrix},
    {"aten::linalg_eig", Tail::kMatrix},
    {"aten::linalg_eigvals", Tail::kMatrix},
    {"aten::linalg_cond", Tail::kMatrix},
    {"aten::linalg_matrix_rank.atol_rtol_tensor", Tail::kMatrix},
    {"aten::linalg_svd", Tail::kMatrix},
    {"aten::linalg_svdvals", Tail::kMatrix},
    {"aten::svd", Tail::kMatrix},
    {"aten::linalg_qr", Tail::kMatrix},
    {"aten::qr", Tail::kMatrix},
    {"aten::linalg_matrix_exp", Tail::kMatrix},
    {"aten::matrix_exp", Tail::kMatrix},
    {"aten::linalg_matrix_power", Tail::kMatrix},
    {"aten::matrix_power", Tail::kMatrix},
};

class TailRule final : public RowsCall {
 public:
  explicit TailRule(const TailOp& entry) : entry_(entry) {}

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0)) return false;
    const Geometry& x = *graph_value(builder, 0).geometry;
    const int64_t rank = x.dim();
    const int64_t leading = rank - tail_of(builder.argument(entry_.argument), rank);
    if (leading <= 0 || leading >= rank) return false;
    for (size_t i = 0; i < builder.num_arguments(); ++i) {
      if (!capture_argument(builder, i, x, leading)) return false;
    }
    builder.key(static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(leading));
    return true;
  }

  const Geometry* geometry_of(NodeBuilder& builder, const Geometry* inferred) const override {
    const Geometry& x = *builder.operand_value(0).geometry;
    const int64_t leading = x.dim() - tail_of(builder.argument(entry_.argument), x.dim());
    if (inferred->dim() < leading) return nullptr;
    at::DimVector sizes(x.sizes.begin(), x.sizes.begin() + leading);
    sizes.append(inferred->sizes.begin() + leading, inferred->sizes.end());
    if (entry_.tail != Tail::kMatrix) return builder.graph().geometries().intern_contiguous(sizes);
    // The matrices of a result may be column-major, but they are adjacent in memory.
    const at::DimVector strides = strides_of(*inferred, leading, sizes);
    if (strides_of(*inferred, leading, inferred->sizes) != at::IntArrayRef(inferred->strides)) {
      return nullptr;
    }
    return builder.graph().geometries().intern(sizes, strides);
  }

 protected:
  Tensor operand(BatchView& batch, size_t slot) const override {
    if (is_weight(batch, slot)) return batch.single(slot);
    if (is_repeated(batch, slot)) {
      const Tensor each = batch.stacked(slot);
      return each.index_select(0, members_of_rows(batch, each.device()));
    }
    const auto& each = batch.operand_value(0, slot).geometry->sizes;
    at::DimVector sizes(each.begin() + leading_of(batch), each.end());
    const Tensor rows = batch.rows(slot, c10::multiply_integers(sizes));
    sizes.insert(sizes.begin(), rows.size(0));
    return rows.view(sizes);
  }

  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    if (is_weight(batch, slot)) return batch.add_single(slot, grad);
    if (!is_repeated(batch, slot)) return batch.add(slot, grad);
    const Tensor sums =
        at::zeros(stacked_sizes(batch.size(), grad.sizes().slice(1)), grad.options());
    batch.add(slot, sums.index_add_(0, members_of_rows(batch, grad.device()), grad));
  }

  void put(Batch& batch, const LocalGraph& graph) const override {
    if (entry_.tail != Tail::kMatrix) return RowsCall::put(batch, graph);
    for (size_t k = 0; k < graph.outputs.size(); ++k) {
      const Tensor& result = graph.outputs[k];
      const Geometry& each = *batch.result_value(0, k).geometry;
      at::DimVector strides{c10::multiply_integers(result.sizes().slice(1))};
      strides.append(each.strides.begin() + leading_of(batch), each.strides.end());
      batch.output(k).as_strided(result.sizes(), strides).copy_(result.detach());
    }
  }

  // Converts dimensions to negative numbers, because the call for all instances merges the leading
  // dimensions.
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
  static Value graph_value(NodeBuilder& builder, size_t i) {
    return builder.graph().value(builder.graph().value_of(builder.tensor(i)));
  }

  // Returns the number of trailing dimensions that the op works on. Returns 0 if the number is
  // unknown. If the op works on all dimensions, returns the rank or a larger number.
  int64_t tail_of(const c10::IValue& argument, int64_t rank) const {
    const auto from = [&](int64_t d) { return d < 0 ? -d : rank - d; };
    switch (entry_.tail) {
      case Tail::kDim:
        return argument.isInt() ? from(argument.toInt()) : 0;
      case Tail::kMatrix:
        return 2;
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

  bool capture_argument(NodeBuilder& builder, size_t i, const Geometry& x, int64_t leading) const {
    const c10::IValue& argument = builder.argument(i);
    const bool dims = entry_.tail == Tail::kDim || entry_.tail == Tail::kDims;
    if (dims && i == entry_.argument) {
      const auto list =
          argument.isInt() ? std::vector<int64_t>{argument.toInt()} : argument.toIntVector();
      builder.key(list.size());
      for (int64_t d : list) builder.key(static_cast<uint64_t>(d < 0 ? d + x.dim() : d));
      return true;
    }
    if (!argument.isTensor()) return !argument.isTensorList() && builder.constant(i);
    if (!builder.is_tensor(i)) {
      builder.absent(i);
      return true;
    }
    const bool weight = (builder.op().weight_arguments >> i & 1) != 0;
    if (weight && builder.is_computed(i)) return false;
    const Value value = weight ? builder.weight(i) : builder.operand(i);
    builder.key(dtype_word(value) << 1 | (value.requires_grad ? 1 : 0));
    return weight || add_row(builder, *value.geometry, x, leading);
  }

  // Returns true if `g` has the rank and the leading sizes of `x`, and is row-major. If the op
  // works on matrices, `g` need not be row-major. Adds the trailing sizes to the key. For matrices,
  // also adds the layout, because the layout of a result can depend on the layout of an operand.
  bool add_row(NodeBuilder& builder, const Geometry& g, const Geometry& x, int64_t leading) const {
    const bool of_matrices = entry_.tail == Tail::kMatrix;
    if (of_matrices && g.numel == 0) return false;  // eager's result has another layout
    const bool repeats = entry_.repeats && g.dim() == 2;
    if (!(g.canonical->contiguous || of_matrices)) return false;
    if (g.dim() != x.dim() && !repeats) return false;
    const bool strided = of_matrices && !g.contiguous;
    const int64_t first = repeats ? 0 : leading;
    builder.key(static_cast<uint64_t>(g.dim()) << 1 | (strided ? 1 : 0));
    for (int64_t d = 0; d < g.dim(); ++d) {
      if (d < first && g.sizes[d] != x.sizes[d]) return false;
      if (d >= first && g.sizes[d] == 0) return false;
      if (d >= first) builder.key(static_cast<uint64_t>(g.sizes[d]));
      if (d >= first && strided) builder.key(static_cast<uint64_t>(g.strides[d]));
    }
    return true;
  }

  // Returns the strides of a result with these sizes. Each row of the result has the layout of a
  // row of `inferred`. The rows are adjacent in memory.
  static at::DimVector strides_of(const Geometry& inferred, int64_t leading,
                                  at::IntArrayRef sizes) {
    at::DimVector strides(inferred.strides.begin(), inferred.strides.end());
    int64_t step = c10::multiply_integers(sizes.slice(leading));
    for (int64_t d = leading; d-- > 0;) {
      strides[d] = step;
      step *= std::max<int64_t>(sizes[d], 1);
    }
    return strides;
  }

  int64_t leading_of(const BatchView& batch) const {
    const int64_t rank = batch.operand_value(0, 0).geometry->dim();
    return rank - tail_of(batch.argument(entry_.argument), rank);
  }

  // Whether each member has a single matrix in this operand, which is used with all of the member's
  // matrices in operand 0.
  bool is_repeated(const BatchView& batch, size_t slot) const {
    return entry_.repeats && batch.operand_value(0, slot).geometry->dim() == 2 &&
           batch.operand_value(0, 0).geometry->dim() > 2;
  }

  // Returns the member to which each row of the call belongs.
  Tensor members_of_rows(const BatchView& batch, at::Device device) const {
    std::vector<int64_t> members;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const auto& sizes = batch.operand_value(m, 0).geometry->sizes;
      const at::IntArrayRef leading(sizes.data(), static_cast<size_t>(leading_of(batch)));
      members.insert(members.end(), static_cast<size_t>(c10::multiply_integers(leading)), m);
    }
    return to_device(at::tensor(members, at::kLong), device);
  }

  static bool is_weight(const BatchView& batch, size_t slot) {
    const uint32_t argument = batch.signature().slots[slot].argument;
    return (batch.signature().op->weight_arguments >> argument & 1) != 0;
  }

  const TailOp& entry_;
};

}  // namespace

RuleTable tail_rules() {
  RuleTable table;
  for (const TailOp& entry : kTailOps) table.push_back({entry.op, new TailRule(entry)});
  return table;
}

}  // namespace autobatch

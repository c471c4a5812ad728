// Ops on tensors that are not row-major, such as transposed sequences. The native rules of these
// ops support row-major tensors only. Eager's results are row-major for any layout of the operand.
// A transposed tensor becomes row-major if its dimensions are sorted by stride. A reduction or a
// scan therefore runs on the tensor with sorted dimensions. All other ops run on a row-major copy.
// Some tensors, such as windows, are not row-major in any order of dimensions. Reductions and scans
// of these tensors are not covered, because a copy would cost more than one batch for each size.
#include "autobatch/rules/decompositions.h"

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = Decomposition::Arguments;
using Results = Decomposition::Results;
using Dims = at::DimVector;

// An op, and the positions of its arguments. Argument 0 of each op is the tensor.
struct LayoutOp {
  std::string_view op;
  size_t dims = 0;  // argument number of the dimension(s), or 0 if the op runs on a copy
  size_t keep = 0;  // argument number of `keepdim`, or 0 if the op keeps all sizes
};

constexpr LayoutOp kOps[] = {
    {"aten::sum.dim_IntList", 1, 2},
    {"aten::mean.dim", 1, 2},
    {"aten::amax", 1, 2},
    {"aten::amin", 1, 2},
    {"aten::max.dim", 1, 2},
    {"aten::min.dim", 1, 2},
    {"aten::argmax", 1, 2},
    {"aten::argmin", 1, 2},
    {"aten::prod.dim_int", 1, 2},
    {"aten::logsumexp", 1, 2},
    {"aten::std.correction", 1, 3},
    {"aten::var.correction", 1, 3},
    {"aten::std.dim", 1, 3},
    {"aten::var.dim", 1, 3},
    {"aten::linalg_vector_norm", 2, 3},
    {"aten::cumsum", 1},
    {"aten::softmax.int", 1},
    {"aten::log_softmax.int", 1},
    {"aten::linear"},
    {"aten::layer_norm"},
    {"aten::batch_norm"},
    {"aten::instance_norm"},
    {"aten::group_norm"},
};

// Returns the dimensions, sorted by descending stride.
Dims memory_order(const Tensor& x) {
  Dims order(static_cast<size_t>(x.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](int64_t d) { return x.stride(d); });
  return order;
}

// Whether x is row-major if its dimensions have this order. The memory of x may have gaps.
bool is_row_major(const Tensor& x, const Dims& order) {
  int64_t extent = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const int64_t d = order[i];
    if (x.size(d) == 1) continue;
    if (x.stride(d) < extent) return false;
    extent = x.stride(d) * x.size(d);
  }
  return true;
}

bool is_row_major(const Tensor& x) {
  Dims order(static_cast<size_t>(x.dim()));
  std::iota(order.begin(), order.end(), 0);
  return is_row_major(x, order);
}

bool is_valid_dim(int64_t dim, int64_t rank) { return dim >= -rank && dim < rank; }

// Returns the dimensions in a call's argument, sorted. Negative numbers are converted. Returns an
// empty list if no dimension is given, a dimension is out of range, or a dimension occurs twice.
Dims dims_of(const c10::IValue& argument, int64_t rank) {
  Dims dims;
  if (argument.isInt()) dims.push_back(argument.toInt());
  if (argument.isIntList()) dims = Dims(argument.toDimVector());
  if (!std::ranges::all_of(dims, [&](int64_t d) { return is_valid_dim(d, rank); })) return {};
  for (int64_t& d : dims) d = at::maybe_wrap_dim(d, rank);
  std::ranges::sort(dims);
  return std::ranges::adjacent_find(dims) == dims.end() ? dims : Dims();
}

const LayoutOp& entry_of(const OpInfo& op) {
  return *std::ranges::find(kOps, std::string_view(op.name), &LayoutOp::op);
}

bool covers(const OpInfo& op, Arguments arguments) {
  if (!is_strided(arguments[0])) return false;
  const LayoutOp& entry = entry_of(op);
  const Tensor& x = arguments[0].toTensor();
  if (x.numel() == 0 || is_row_major(x) || x.is_conj() || x.is_neg()) return false;
  if (entry.dims == 0) return x.suggest_memory_format() == at::MemoryFormat::Contiguous;
  return is_row_major(x, memory_order(x)) && !dims_of(arguments[entry.dims], x.dim()).empty();
}

// Returns the positions of `dims` in `order`.
Dims positions_in(const Dims& order, const Dims& dims) {
  Dims positions;
  for (int64_t d : dims) positions.push_back(std::ranges::find(order, d) - order.begin());
  return positions;
}

// Returns `result` with its dimensions in ascending order. dims[i] is the number of dimension i of
// `result`. The returned tensor is row-major, as in eager.
Tensor sorted(const Tensor& result, const Dims& dims) {
  if (std::ranges::is_sorted(dims)) return result;
  Dims ascending = dims;
  std::ranges::sort(ascending);
  return result.permute(positions_in(dims, ascending)).clone(at::MemoryFormat::Contiguous);
}

// Runs the op on x with the dimensions of x in this order. All results have the same dimensions.
Results run_in(const Dims& order, const OpInfo& op, Arguments arguments) {
  const LayoutOp& entry = entry_of(op);
  const Tensor& x = arguments[0].toTensor();
  const Dims dims = dims_of(arguments[entry.dims], x.dim());
  const bool keeps = entry.keep != 0 && arguments[entry.keep].toBool();
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack[0] = x.permute(order);
  const Dims positions = positions_in(order, dims);
  stack[entry.dims] = arguments[entry.dims].isInt() ? c10::IValue(positions[0])
                                                    : c10::IValue(at::IntArrayRef(positions));
  if (entry.keep != 0) stack[entry.keep] = false;

  Dims left = order;
  if (entry.keep != 0) {
    left.erase(
        std::ranges::remove_if(left, [&](int64_t d) { return std::ranges::count(dims, d) > 0; })
            .begin(),
        left.end());
  }
  Results results = call_with(op, std::move(stack));
  for (Tensor& result : results) {
    result = sorted(result, left);
    if (!keeps) continue;
    at::DimVector sizes(x.sizes());
    for (int64_t d : dims) sizes[d] = 1;
    result = at::_unsafe_view(result, sizes);  // for autograd, the result is not a view
  }
  return results;
}

Results run(const OpInfo& op, Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  if (entry_of(op).dims != 0) return run_in(memory_order(x), op, arguments);
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack[0] = x.clone(at::MemoryFormat::Contiguous);
  return call_with(op, std::move(stack));
}

}  // namespace

DecompositionTable layout_decompositions() {
  static const auto table = [] {
    std::array<DecompositionEntry, std::size(kOps)> entries;
    for (size_t i = 0; i < entries.size(); ++i) entries[i] = {kOps[i].op, {covers, run}};
    return entries;
  }();
  return table;
}

}  // namespace autobatch

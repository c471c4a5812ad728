// Products of a sparse matrix that belongs to the instance and a dense tensor. One batch multiplies
// matrices of any sizes. The batch is equivalent to one product with a block-diagonal matrix.
#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/decompositions.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>

#include <algorithm>
#include <type_traits>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = Decomposition::Arguments;
using NoCapture = c10::impl::ExcludeDispatchKeyGuard;

// --- from the op to autobatch::sparse_product ---

// The entries of a sparse matrix: int64 indices [2, n] and values [n]. A pair of indices may occur
// several times.
struct Entries {
  Tensor indices, values;
};

const at::SparseTensorImpl& coo_impl(const Tensor& matrix) {
  return *static_cast<const at::SparseTensorImpl*>(matrix.unsafeGetTensorImpl());
}

// Whether entries_of() supports the layout of the matrix, and the entries are numbers and not
// tensors.
bool has_scalar_entries(const Tensor& matrix) {
  if (matrix.layout() == c10::kSparse) {
    return coo_impl(matrix).dense_dim() == 0;
  }
  const NoCapture no_capture(compat::kDeferKey);
  return (matrix.layout() == c10::kSparseCsr || matrix.layout() == c10::kSparseCsc) &&
         matrix.dense_dim() == 0;
}

Entries entries_of(const Tensor& matrix) {
  const NoCapture no_capture(compat::kDeferKey);
  // The values are copied, because a write to the matrix does not change the version counter of the
  // values.
  if (matrix.layout() == c10::kSparse) {
    return {coo_impl(matrix).indices(), coo_impl(matrix).values().clone()};
  }
  const bool by_row = matrix.layout() == c10::kSparseCsr;
  const Tensor indices = at::_convert_indices_from_csr_to_coo(
      by_row ? matrix.crow_indices() : matrix.ccol_indices(),
      by_row ? matrix.col_indices() : matrix.row_indices(), /*out_int32=*/false,
      /*transpose=*/!by_row);
  return {indices, matrix.values().clone()};
}

bool covers(Arguments arguments) { return is_sparse_product(arguments[0], arguments[1]); }

Tensor multiply(Arguments arguments) {
  using Product = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t);
  static const auto& op = *new c10::TypedOperatorHandle<Product>(
      find_op("autobatch::sparse_product", "").handle.typed<Product>());
  const Tensor& matrix = arguments[0].toTensor();
  const Entries entries = entries_of(matrix);
  return op.call(entries.indices, entries.values, arguments[1].toTensor(), matrix.size(0));
}

constexpr DecompositionEntry kEntries[] = {
    {"aten::mm", one<covers, multiply>},         {"aten::mv", one<covers, multiply>},
    {"aten::matmul", one<covers, multiply>},     {"aten::smm", one<covers, multiply>},
    {"aten::_sparse_mm", one<covers, multiply>},
};

// --- the rule ---

template <class T>
SparseProductKernel<T> kernel() {
  const CpuKernels* kernels = cpu_kernels();
  if (kernels == nullptr) return add_sparse_product<T>;
  if constexpr (std::is_same_v<T, float>) {
    return kernels->sparse_product_float;
  } else {
    return kernels->sparse_product_double;
  }
}

void check_indices(const int64_t* indices, int64_t count, int64_t size) {
  const bool valid =
      std::all_of(indices, indices + count, [size](int64_t i) { return i >= 0 && i < size; });
  TORCH_CHECK_INDEX(valid, "torch_autobatch: an index of a sparse matrix is out of range");
}

// The rule of sparse_product(indices [2, n], values [n], x [m, ...], size) -> [size, ...].
class SparseProductRule final : public Rule {
 public:
  bool reads(size_t slot) const override { return slot != kDense; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value indices = builder.operand(kIndices), values = builder.operand(kValues),
                x = builder.operand(kDense);
    if (values.requires_grad || !row_major(x) || !row_major(values)) return false;
    if (indices.geometry->dim() != 2) return false;
    at::DimVector sizes(x.geometry->sizes);
    sizes[0] = builder.argument(3).toInt();
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(width_of(x)) << 8 | sizes.size());
    builder.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t width = width_of(batch.operand_value(0, kDense));
    Tensor out = batch.output_rows(0, width);
    multiply(batch, batch.rows(kDense, width), false, out);
  }

  void backward(BackwardBatch& batch) const override {
    if (!batch.needs(kDense)) return;
    const int64_t width = width_of(batch.operand_value(0, kDense));
    const Tensor g = batch.grad_rows(0, width);
    int64_t rows = 0;
    for (int64_t m = 0; m < batch.size(); ++m) rows += dense_rows(batch, m);
    Tensor gx = at::empty({rows, width}, g.options());
    multiply(batch, g, true, gx);
    batch.add(kDense, std::move(gx));
  }

  std::vector<Tensor> eager(const Signature&, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor> places) const override {
    return {sparse_product(operands[0], operands[1], operands[2], places[0].size(0))};
  }

 private:
  static constexpr size_t kIndices = 0, kValues = 1, kDense = 2;

  static int64_t width_of(const Value& x) {
    return x.geometry->dim() == 1 ? 1 : x.geometry->sizes[1];
  }
  static int64_t dense_rows(const BatchView& batch, int64_t m) {
    return batch.operand_value(m, kDense).geometry->sizes[0];
  }
  static int64_t result_rows(const BatchView& batch, int64_t m) {
    return batch.result_value(m, 0).geometry->sizes[0];
  }

  // Multiplies each member's matrix, or the transposed matrix if `transposed` is set, by the
  // member's rows of `x`.
  static void multiply(BatchView& batch, const Tensor& x, bool transposed, Tensor& out) {
    const Tensor indices = batch.flat(kIndices), values = batch.flat(kValues);
    out.zero_();
    if (!has_host_memory(x.device())) {
      return multiply_on_device(batch, indices, values, x, transposed, out);
    }
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "autobatch_sparse_product", [&] {
      const auto run = kernel<scalar_t>();
      const Tensor source = x.contiguous();
      int64_t entry = 0, x_row = 0, out_row = 0;
      const int64_t width = x.size(1);
      for (int64_t m = 0; m < batch.size(); ++m) {
        const int64_t count = batch.operand_value(m, kValues).geometry->numel;
        const int64_t dense = dense_rows(batch, m), result = result_rows(batch, m);
        const int64_t* rows = indices.const_data_ptr<int64_t>() + 2 * entry;
        const int64_t* columns = rows + count;
        check_indices(rows, count, result);
        check_indices(columns, count, dense);
        run({transposed ? columns : rows, transposed ? rows : columns,
             values.const_data_ptr<scalar_t>() + entry, count,
             source.const_data_ptr<scalar_t>() + x_row * width,
             out.mutable_data_ptr<scalar_t>() + out_row * width, width});
        entry += count;
        x_row += transposed ? result : dense;
        out_row += transposed ? dense : result;
      }
    });
  }

  static void multiply_on_device(const BatchView& batch, const Tensor& indices,
                                 const Tensor& values, const Tensor& x, bool transposed,
                                 Tensor& out) {
    // For each entry: the position of its row index in `indices`, the distance from its row index
    // to its column index, and the first rows of its member in the result and in x.
    std::vector<int64_t> positions, distances, result_starts, dense_starts;
    int64_t start = 0, result_start = 0, dense_start = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const int64_t count = batch.operand_value(m, kValues).geometry->numel;
      for (int64_t e = 0; e < count; ++e) {
        positions.push_back(start + e);
        distances.push_back(count);
        result_starts.push_back(result_start);
        dense_starts.push_back(dense_start);
      }
      start += 2 * count;
      result_start += result_rows(batch, m);
      dense_start += dense_rows(batch, m);
    }
    const auto sent = [&](const std::vector<int64_t>& numbers) {
      return to_device(at::tensor(numbers, at::kLong), x.device());
    };
    const Tensor at_rows = sent(positions);
    const Tensor rows = indices.index_select(0, at_rows) + sent(result_starts);
    const Tensor columns = indices.index_select(0, at_rows + sent(distances)) + sent(dense_starts);
    const Tensor terms = x.index_select(0, transposed ? rows : columns) * values.unsqueeze(1);
    out.index_add_(0, transposed ? columns : rows, terms);
  }
};

}  // namespace

Tensor sparse_product(const Tensor& indices, const Tensor& values, const Tensor& x, int64_t size) {
  at::DimVector sizes(x.sizes());
  sizes[0] = size;
  const Tensor factors = x.dim() == 1 ? values : values.unsqueeze(1);
  const Tensor terms = x.index_select(0, indices.select(0, 1)) * factors;
  return at::zeros(sizes, x.options()).index_add(0, indices.select(0, 0), terms);
}

bool is_sparse_product(const c10::IValue& matrix, const c10::IValue& dense) {
  if (!is_given(matrix) || !is_strided(dense)) return false;
  const Tensor &m = matrix.toTensor(), &x = dense.toTensor();
  if (m.layout() == c10::kStrided || m.requires_grad() || m.dim() != 2) return false;
  const auto dtype = x.scalar_type();
  if (m.scalar_type() != dtype || (dtype != at::kFloat && dtype != at::kDouble)) return false;
  return (x.dim() == 1 || x.dim() == 2) && x.numel() > 0 && x.size(0) == m.size(1) &&
         m.device() == x.device() && has_scalar_entries(m);
}

DecompositionTable sparse_decompositions() { return kEntries; }

RuleTable sparse_rules() { return {{"autobatch::sparse_product", new SparseProductRule()}}; }

}  // namespace autobatch

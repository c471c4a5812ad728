// Products in which each instance has its own matrices. The matrices may have any sizes. If all
// sizes are equal, the products run as one batched matrix product. Products with a vector, and
// products of different sizes, read the matrices in place (matrix_products.h).
#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/matrix_products.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/rules/by_shape.h"
#include "autobatch/rules/rowwise.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

using at::Tensor;

// The matrix in a region, or the batch of matrices if the region has more than two dimensions. A
// vector is one row on the left side of a product, and one column on the right side.
class Matrices {
 public:
  Matrices(const Region& region, bool on_left) {
    const auto &sizes = region.geometry->sizes, &strides = region.geometry->strides;
    // The constant pointer is used because operands are only read. A copy-on-write buffer is then
    // not materialized.
    data_ = static_cast<char*>(const_cast<void*>(region.buffer->const_data_ptr()));
    item_ = static_cast<int64_t>(region.buffer->element_size());
    data_ += region.offset * item_;
    const size_t dim = sizes.size();
    if (dim == 0) {
      first_ = {data_};
    } else if (dim == 1) {
      first_ = {data_, sizes[0], 1, strides[0], 0};
      if (on_left) first_ = first_.transposed();
    } else {
      first_ = {data_, sizes[dim - 2], sizes[dim - 1], strides[dim - 2], strides[dim - 1]};
    }
    if (dim > 2) leading_ = region.geometry;
    for (size_t d = 0; d + 2 < dim; ++d) count_ *= sizes[d];
  }

  int64_t count() const { return count_; }
  Matrices transposed() const {
    Matrices turned = *this;
    turned.first_ = first_.transposed();
    return turned;
  }
  MatrixPlace operator[](int64_t i) const {
    MatrixPlace place = first_;
    if (leading_ == nullptr) return place;
    int64_t offset = 0;
    for (size_t d = leading_->sizes.size() - 2; d-- > 0;) {
      offset += i % leading_->sizes[d] * leading_->strides[d];
      i /= leading_->sizes[d];
    }
    place.data = data_ + offset * item_;
    return place;
  }

 private:
  char* data_;
  int64_t item_;
  MatrixPlace first_;
  int64_t count_ = 1;
  const Geometry* leading_ = nullptr;  // the leading dimensions number the matrices
};

// Computes products of any sizes one after another.
class ProductsInPlace {
 public:
  static bool can_run(const Value& x) {
    return has_host_memory(x.device) && has_cpu_kernels(x.dtype);
  }
  static bool can_run(const BatchView& batch) { return can_run(batch.operand_value(0, 0)); }

  // Operand `left` is the left side of each product, and the other operand is the right side.
  static void forward(const Batch& batch, size_t left = 0) {
    std::vector<MatrixProduct> products;
    products.reserve(static_cast<size_t>(batch.size()));
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Sides sides(batch, m, left);
      add(products, sides.result(batch.result_region(m, 0)), sides.x, sides.y, false);
    }
    run_matrix_products(products, batch.operand_value(0, 0).dtype, /*disjoint=*/true);
  }

  static void backward(BackwardBatch& batch, size_t left = 0) {
    std::vector<Sides> members;
    std::vector<Matrices> gradients;
    members.reserve(static_cast<size_t>(batch.size()));
    gradients.reserve(static_cast<size_t>(batch.size()));
    for (int64_t m = 0; m < batch.size(); ++m) {
      members.emplace_back(batch, m, left);
      gradients.push_back(members.back().result(batch.grad_region(m, 0)));
    }
    // Appends the product that computes the gradient of member m's operand.
    const auto add_gradient = [&](std::vector<MatrixProduct>& products, int64_t m, size_t slot,
                                  const Region& to, bool adds) {
      const Sides& sides = members[static_cast<size_t>(m)];
      const Matrices& g = gradients[static_cast<size_t>(m)];
      slot == left ? add(products, {to, true}, g, sides.y.transposed(), adds)    // g y^T
                   : add(products, {to, false}, sides.x.transposed(), g, adds);  // x^T g
    };
    for (size_t slot = 0; slot < 2; ++slot) {
      if (!batch.needs(slot)) continue;
      batch.in_subgraph() ? add_to_subgraph(batch, slot, add_gradient)
                          : add_in_place(batch, slot, add_gradient);
    }
  }

 private:
  struct Sides {
    Sides(const BatchView& batch, int64_t m, size_t left)
        : x(batch.operand_region(m, left), true),
          y(batch.operand_region(m, 1 - left), false),
          by_row(batch.operand_value(m, left).geometry->dim() == 1) {}
    // A one-dimensional result is a row if the left side is a vector, and otherwise a column.
    Matrices result(const Region& region) const { return {region, by_row}; }

    Matrices x, y;
    bool by_row;
  };

  static void add(std::vector<MatrixProduct>& products, const Matrices& out, const Matrices& x,
                  const Matrices& y, bool adds) {
    for (int64_t i = 0; i < out.count(); ++i) products.push_back({out[i], x[i], y[i], adds});
  }

  template <class AddGradient>
  static void add_in_place(BackwardBatch& batch, size_t slot, const AddGradient& add_gradient) {
    std::vector<MatrixProduct> products;
    Regions targets;
    products.reserve(static_cast<size_t>(batch.size()));
    targets.reserve(static_cast<size_t>(batch.size()));
    for (int64_t m = 0; m < batch.size(); ++m) {
      if (!batch.wanted(batch.operand(m, slot))) continue;
      const Region to = batch.target_to_add(m, batch.operand(m, slot));
      add_gradient(products, m, slot, to, !to.fresh);
      targets.push_back(to);
    }
    const Geometry& g = *targets.front().geometry;
    const Layout layout = layout_of(targets);
    const bool disjoint = !g.overlapping && (targets.size() == 1 || layout.consecutive ||
                                             (layout.regular && layout.step >= g.extent));
    run_matrix_products(products, batch.operand_value(0, 0).dtype, disjoint);
  }

  template <class AddGradient>
  static void add_to_subgraph(BackwardBatch& batch, size_t slot, const AddGradient& add_gradient) {
    const Value& first = batch.operand_value(0, slot);
    GeometryTable geometries;
    const Geometry* rows = geometries.intern_contiguous(first.geometry->sizes);
    Tensor gradient = pooled_empty(stacked_sizes(batch.size(), rows->sizes), first.options());
    std::vector<MatrixProduct> products;
    for (int64_t m = 0; m < batch.size(); ++m) {
      add_gradient(products, m, slot, {&gradient, m * rows->numel, rows}, false);
    }
    run_matrix_products(products, first.dtype, /*disjoint=*/true);
    batch.add(slot, std::move(gradient));
  }
};

// --- a matrix of any number of rows and a vector ---

// Products [n, K] x [K] -> [n] and [n] x [n, K] -> [K]. Each instance has its own vector, or all
// instances share one vector.
class RowsVectorRule final : public Rule {
 public:
  explicit RowsVectorRule(bool on_left) : on_left_(on_left) {}

  bool heavy() const override { return true; }
  bool reads_result(uint32_t) const override { return false; }
  bool gains_if_shared(size_t slot) const override { return slot == 1 && !on_left_; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !builder.is_tensor(1)) return false;
    const Value x = builder.operand(on_left_ ? 1 : 0);
    const Value v = builder.operand(on_left_ ? 0 : 1);
    const auto& rows = x.geometry->sizes;
    if (rows.size() != 2 || v.geometry->dim() != 1 || rows[1] == 0) return false;
    if (x.dtype != v.dtype || !is_float(x)) return false;
    if (v.geometry->sizes[0] != rows[on_left_ ? 0 : 1]) return false;
    builder.key(dtype_word(x));
    if (!ProductsInPlace::can_run(x)) builder.key(static_cast<uint64_t>(rows[1]));
    builder.result({rows[on_left_ ? 1 : 0]}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    if (by_kernel(batch)) return ProductsInPlace::forward(batch, on_left_ ? 1 : 0);
    const Tensor x = matrix(batch);
    if (on_left_) {
      Tensor out = batch.output_rows(0, x.size(1));
      segment_sum(x * batch.flat(1).unsqueeze(1), counts(batch), out);
      return;
    }
    Tensor out = batch.output(0);
    if (one_value(batch, 1)) {
      at::mv_out(out, x, batch.single(1));
    } else {
      at::sum_out(out, x * vectors(batch, x.size(1)), 1);
    }
  }

  void backward(BackwardBatch& batch) const override {
    if (by_kernel(batch)) return ProductsInPlace::backward(batch, on_left_ ? 1 : 0);
    const Tensor x = matrix(batch);
    if (on_left_) {
      const Tensor g = repeat_rows(batch.grad_rows(0, x.size(1)), counts(batch));
      if (batch.needs(0)) batch.add(0, g * batch.flat(1).unsqueeze(1));
      if (batch.needs(1)) batch.add(1, (g * x).sum(1));
      return;
    }
    const Tensor g = batch.grad_flat(0).unsqueeze(1);
    const bool shared = one_value(batch, 1);
    if (batch.needs(0)) {
      batch.add(0, g * (shared ? batch.single(1) : vectors(batch, x.size(1))));
    }
    if (!batch.needs(1)) return;
    if (shared) return batch.add_single(1, at::mv(x.t(), g.squeeze(1)));
    Tensor sums = pooled_empty({batch.size(), x.size(1)}, x.options());
    segment_sum(g * x, counts(batch), sums);
    batch.add(1, sums);
  }

 private:
  // Whether the kernel for vector products runs the batch. If all instances share the vector on the
  // right, the kernel is not used. The rows of all instances then form one matrix, and the product
  // is one call of mv.
  bool by_kernel(BatchView& batch) const {
    return (on_left_ || !one_value(batch, 1)) && ProductsInPlace::can_run(batch);
  }
  static Tensor matrix(BatchView& batch) {
    return batch.rows(0, batch.operand_value(0, 0).geometry->sizes[1]);
  }
  // Returns the vectors. The vector of an instance is repeated for each row of the instance.
  static Tensor vectors(BatchView& batch, int64_t width) {
    return repeat_rows(batch.rows(1, width), counts(batch));
  }
  static Counts counts(const BatchView& batch) {
    Counts counts;
    for (int64_t m = 0; m < batch.size(); ++m) {
      counts.push_back(batch.operand_value(m, 0).geometry->sizes[0]);
    }
    return counts;
  }

  bool on_left_;
};

// --- products of two matrices that belong to the instance, or of batches of matrices ---

class ProductRule final : public Rule {
 public:
  // Makes the rule of products whose operands have these ranks. If both ranks are 0, the rule
  // covers all ranks that matmul accepts, if the right side is a matrix or the dimensions before
  // the last two need no broadcasting.
  ProductRule(size_t left_rank, size_t right_rank)
      : left_rank_(left_rank), right_rank_(right_rank) {}

  bool heavy() const override { return true; }
  bool reads_result(uint32_t) const override { return false; }
  bool gains_if_shared(size_t slot) const override { return slot == 1; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !builder.is_tensor(1)) return false;
    const Value x = builder.operand(0);
    const Value y = builder.operand(1);
    const auto& a = x.geometry->sizes;
    const auto& b = y.geometry->sizes;
    if (x.dtype != y.dtype) builder.leave_to_eager();
    if (x.dtype != y.dtype || !is_float(x) || a.empty() || b.empty()) return false;
    if (left_rank_ != 0 && (a.size() != left_rank_ || b.size() != right_rank_)) return false;
    const size_t leading = a.size() > 2 ? a.size() - 2 : 0;
    if (leading > 0 && b.size() == 2 ? !row_major(x) : !has_same_leading(a, b)) return false;
    if (a.back() != (b.size() == 1 ? b[0] : b[b.size() - 2])) return false;
    if (x.geometry->numel == 0 || y.geometry->numel == 0) return false;
    builder.key(dtype_word(x));
    builder.key(form_word(*x.geometry, *y.geometry));
    at::DimVector out(a.begin(), a.begin() + static_cast<int64_t>(leading));
    if (a.size() > 1) out.push_back(a[a.size() - 2]);
    if (b.size() > 1) out.push_back(b.back());
    builder.result(out, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    if (has_one_right_side(batch)) {
      Tensor out = batch.output_rows(0, columns(batch));
      return multiply_into(out, batch.rows(0, inner(batch)), batch.single(1), nullptr);
    }
    if (in_place(batch)) return ProductsInPlace::forward(batch);
    if (!uniform(batch)) return forward_by_size(batch);
    const Tensor x = left(batch.stacked(0), batch.stacked(1));
    const Tensor y = right(batch.stacked(1));
    Tensor out = batch.output(0).view({x.size(0), x.size(1), y.size(2)});
    multiply_each(out, x, y);
  }

  void backward(BackwardBatch& batch) const override {
    if (has_one_right_side(batch)) return backward_by_rows(batch);
    if (in_place(batch)) return ProductsInPlace::backward(batch);
    if (!uniform(batch)) return backward_by_size(batch);
    const Tensor x = left(batch.stacked(0), batch.stacked(1));
    const Tensor y = right(batch.stacked(1));
    const Tensor g = batch.grad_flat(0).view({x.size(0), x.size(1), y.size(2)});
    if (batch.needs(0)) {
      batch.operand_value(0, 0).geometry->dim() == 2 && batch.shared(0)
          ? batch.add_single(0, sum_of_products(g, y))
          : add(batch, 0, g, y.mT());
    }
    if (batch.needs(1)) add(batch, 1, x.mT(), g);
  }

 private:
  // Whether the dimensions before the last two are equal, or both operands have at most two
  // dimensions.
  static bool has_same_leading(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
    if (a.size() <= 2) return b.size() <= 2;
    return a.size() == b.size() && std::equal(a.begin(), a.end() - 2, b.begin());
  }

  // Returns a word of the key. The word contains the rank of each operand, and whether the operand
  // is transposed. The word distinguishes products at different points of a model. Without the
  // word, `q @ k.mT` and the product of the attention weights and v could have one signature. The
  // policy `agenda` would then compute one mean depth for products at different points of the
  // model.
  static uint64_t form_word(const Geometry& x, const Geometry& y) {
    const auto by_row = [](const Geometry& g) {
      return static_cast<uint64_t>(g.strides.back() == 1);
    };
    return x.sizes.size() << 16 | y.sizes.size() << 8 | by_row(x) << 1 | by_row(y);
  }

  // --- a shared matrix on the right side: the left sides of all instances form one matrix ---

  static int64_t inner(const BatchView& batch) {
    return batch.operand_value(0, 0).geometry->sizes.back();
  }
  static int64_t columns(const BatchView& batch) {
    return batch.operand_value(0, 1).geometry->sizes.back();
  }

  // Computed matrices are shared if all instances compute them from the same parameters
  // (plan/common_subexpressions.h).
  static bool has_one_right_side(BatchView& batch) {
    return batch.size() > 1 && batch.operand_value(0, 1).geometry->dim() == 2 && batch.shared(1);
  }

  static void backward_by_rows(BackwardBatch& batch) {
    const Tensor g = batch.grad_rows(0, columns(batch));
    if (batch.needs(0)) {
      batch.add_computed(0, {g.size(0), inner(batch)},
                         [&](Tensor& to) { multiply_into(to, g, batch.single(1).t(), nullptr); });
    }
    if (batch.needs(1)) batch.add_product(1, batch.rows(0, inner(batch)), g);
  }

  static bool uniform(const BatchView& batch) { return batch.uniform(0) && batch.uniform(1); }
  static bool in_place(BatchView& batch) {
    const auto& a = batch.operand_value(0, 0).geometry->sizes;
    const auto& b = batch.operand_value(0, 1).geometry->sizes;
    if ((a.size() > 2 && b.size() == 2) || !ProductsInPlace::can_run(batch)) return false;
    // Stacking would copy a right side that all members share.
    const bool shares = batch.size() > 1 && b.size() > 2 && batch.shared(1);
    return shares || !uniform(batch) || is_with_vector(a, b);
  }
  static bool is_with_vector(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
    const bool row = a.size() == 1 || a[a.size() - 2] == 1;
    const bool column = b.size() == 1 || b.back() == 1;
    return row || column || a.back() == 1;
  }

  // Returns the sum of the products g y^T of all members, [M, K]. If the sum has fewer rows than
  // columns, the function computes the transposed sum, because less data must then be transposed.
  static Tensor sum_of_products(const Tensor& g, const Tensor& y) {
    return y.size(1) > g.size(1) ? sum_of_each(y, g).t() : sum_of_each(g, y);
  }

  // For each member, adds the product of x and y to the gradient of operand `slot`.
  static void add(BackwardBatch& batch, size_t slot, const Tensor& x, const Tensor& y) {
    batch.add_computed(slot, {x.size(0), x.size(1), y.size(2)},
                       [&](Tensor& to) { multiply_each(to, x, y); });
  }

  // --- one call for each size, if no kernel can run several sizes ---

  static void forward_by_size(Batch& batch) {
    for (const Members& members : groups_of(batch)) {
      const Tensor y = stacked_of(batch, 1, members);
      const Tensor x = left(stacked_of(batch, 0, members), y);
      put_results(batch, 0, members, at::bmm(x, right(y)));
    }
  }

  static void backward_by_size(BackwardBatch& batch) {
    for (const Members& members : groups_of(batch)) {
      const Tensor of_right = stacked_of(batch, 1, members);
      const Tensor x = left(stacked_of(batch, 0, members), of_right);
      const Tensor y = right(of_right);
      const Tensor g = gradients_of(batch, 0, members).reshape({x.size(0), x.size(1), y.size(2)});
      if (batch.needs(0)) add_gradients(batch, 0, members, at::bmm(g, y.mT()));
      if (batch.needs(1)) add_gradients(batch, 1, members, at::bmm(x.mT(), g));
    }
  }

  // Returns the left sides [n, ..] as [B, M, K]. A vector is one row. The batch dimensions of the
  // left sides are merged into B. If the right sides `y` have no batch dimensions, B is n, and the
  // batch dimensions of the left sides are merged into M.
  static Tensor left(const Tensor& x, const Tensor& y) {
    if (x.dim() == 2) return x.unsqueeze(1);
    if (x.dim() == 3) return x;
    return y.dim() == 3 ? x.flatten(1, -2) : x.flatten(0, -3);
  }
  // Returns the right sides as [B, K, N]. A vector is one column.
  static Tensor right(const Tensor& y) {
    return y.dim() == 2 ? y.unsqueeze(2) : y.dim() > 3 ? y.flatten(0, -3) : y;
  }

  size_t left_rank_, right_rank_;
};

struct ProductOp {
  const char* op;
  size_t left_rank, right_rank;
};

constexpr ProductOp kProducts[] = {
    {"aten::mm", 2, 2},  {"aten::bmm", 3, 3},    {"aten::mv", 2, 1},
    {"aten::dot", 1, 1}, {"aten::matmul", 0, 0},
};

}  // namespace

RuleTable product_rules() {
  RuleTable table{{"aten::mv", new RowsVectorRule(false)},
                  {"aten::matmul", new RowsVectorRule(false)},
                  {"aten::matmul", new RowsVectorRule(true)}};
  for (const ProductOp& entry : kProducts) {
    table.push_back({entry.op, new ProductRule(entry.left_rank, entry.right_rank)});
  }
  return table;
}

}  // namespace autobatch

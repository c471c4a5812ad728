// Matrix products with a weight (a graph input in a weight position). One GEMM multiplies the rows
// of all instances. Instances may have any number of rows.
#include "autobatch/rules/linear.h"

#include "autobatch/graph/pending_tensor.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/rules/rowwise.h"
#include "autobatch/rules/weight_groups.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// An op that multiplies rows x [.., K] by one matrix, and the positions of its arguments.
// `transposed`: the matrix is given as [M, K] (linear, W @ v). Otherwise the matrix is given as [K,
// M] (mm). `column`: x is the right operand, and is a vector or a matrix with one column.
struct Affine {
  const char* op;
  size_t x, weight;
  int bias;  // argument number, or -1
  bool transposed;
  bool column = false;
};

class AffineRule final : public Rule, public WeightGroups {
 public:
  explicit AffineRule(const Affine& entry) : entry_(entry) {}

  bool heavy() const override { return true; }
  bool reads(size_t slot) const override { return slot != 2; }
  bool reads_result(uint32_t) const override { return false; }
  bool by_row() const { return entry_.transposed; }
  std::vector<Addend> addends(const Tape& tape, const Node& node) const override {
    if (node.num_operands < 3 || tape.operands_of(node)[2] == kNone) return {};
    const int64_t row = width(tape.values[node.first_value]);
    return {{2, 0, row, row}};
  }

  bool capture(NodeBuilder& builder) const override {
    if (!is_weight(builder)) return false;
    const Value x = builder.operand(entry_.x);
    const auto& sizes = x.geometry->sizes;
    // Must come before weight(), which makes the tensor a weight of the graph even if the rule then
    // rejects the call.
    if (builder.tensor(entry_.weight).dim() != 2 || !fits(builder, sizes)) return false;
    const Value w = builder.weight(entry_.weight);
    const int64_t k = w.geometry->sizes[entry_.transposed ? 1 : 0];
    const int64_t m = w.geometry->sizes[entry_.transposed ? 0 : 1];
    if ((entry_.column ? sizes.front() : sizes.back()) != k || k == 0 || m == 0) return false;
    if (x.dtype != w.dtype) builder.leave_to_eager();  // Meta kernels accept both dtypes
    if (x.dtype != w.dtype || !is_float(x) || !row_major(x)) return false;
    builder.key(dtype_word(x));
    if (!bias(builder, x, m)) return false;
    at::DimVector out(sizes.begin(), sizes.end());
    (entry_.column ? out.front() : out.back()) = m;
    builder.result(out, x.dtype);
    return true;
  }

  bool may_join(const Tape& tape, const Node& a, const Node& b) const override {
    if (a.num_operands != b.num_operands) return false;
    if (a.signature->context.word() != b.signature->context.word()) return false;
    const auto operands_a = tape.operands_of(a), operands_b = tape.operands_of(b);
    for (size_t slot = 0; slot < operands_a.size(); ++slot) {
      if ((operands_a[slot] == kNone) != (operands_b[slot] == kNone)) return false;
      if (operands_a[slot] == kNone) continue;
      const Value& of_a = tape.values[operands_a[slot]];
      const Value& of_b = tape.values[operands_b[slot]];
      if (of_a.dtype != of_b.dtype || of_a.device != of_b.device) return false;
      if (slot > 0 && of_a.geometry != of_b.geometry) return false;
    }
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.output_rows(0, result_width(batch));
    if (!is_one_group(batch)) return forward_by_weight(batch, out);
    multiply_by(batch, 0, batch.rows(0, input_width(batch)), out);
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor g = batch.grad_rows(0, result_width(batch));
    if (!is_one_group(batch)) return backward_by_weight(batch, g);
    if (batch.needs(0)) {
      batch.add_computed(0, {g.size(0), input_width(batch)}, [&](Tensor& to) {
        WeightCopies* copies = batch.weight_copies(1);
        multiply_into(to, g, turned(batch, 0), copies);
      });
    }
    if (batch.needs(1)) add_product(batch, g, batch.rows(0, input_width(batch)));
    if (has_bias(batch) && batch.needs(2)) batch.add_product(2, g, Tensor());
  }

 private:
  // Computes x times the matrix of member m, plus the bias of member m, and writes it to `out`.
  void multiply_by(const BatchView& batch, int64_t m, const Tensor& x, Tensor& out) const {
    const bool adds = has_bias(batch) && !batch.leaves_addends();
    WeightCopies* copies = batch.weight_copies(1, m);
    multiply_into(out, x, matrix(batch, m), copies,
                  adds ? region_view(batch.operand_region(m, 2)) : Tensor());
  }

  void add_product(BackwardBatch& batch, const Tensor& g, const Tensor& x) const {
    entry_.transposed ? batch.add_product(1, g, x) : batch.add_product(1, x, g);
  }

  void forward_by_weight(Batch& batch, const Tensor& out) const {
    const std::vector<WeightGroup> groups = weight_groups(batch, 0, input_width(batch));
    const std::vector<Tensor> x = inputs(batch, groups);
    for (size_t i = 0; i < groups.size(); ++i) {
      Tensor to = groups[i].of(out);
      multiply_by(batch, groups[i].first, x[i], to);
    }
  }

  void backward_by_weight(BackwardBatch& batch, const Tensor& g) const {
    const std::vector<WeightGroup> groups = weight_groups(batch, 0, input_width(batch));
    if (batch.needs(0)) {
      batch.add_computed(0, {g.size(0), input_width(batch)}, [&](Tensor& gradient) {
        for (const WeightGroup& group : groups) {
          Tensor to = group.of(gradient);
          WeightCopies* copies = batch.weight_copies(1, group.first);
          multiply_into(to, group.of(g), turned(batch, group.first), copies);
        }
      });
    }
    const std::vector<Tensor> x = batch.needs(1) ? inputs(batch, groups) : std::vector<Tensor>();
    std::vector<NodeId> members;
    for (size_t i = 0; i < groups.size(); ++i) {
      BackwardBatch part = part_of_group(batch, groups[i], members);
      const Tensor g_part = groups[i].of(g);
      if (part.needs(1)) add_product(part, g_part, x[i]);
      if (has_bias(part) && part.needs(2)) part.add_product(2, g_part, Tensor());
    }
  }

  // Returns the rows of each group. The results are views if the rows of every group are contiguous
  // in memory. Otherwise the results are parts of one gathered copy.
  std::vector<Tensor> inputs(BatchView& batch, const std::vector<WeightGroup>& groups) const {
    const int64_t width = input_width(batch);
    std::vector<Tensor> parts;
    for (const WeightGroup& group : groups) {
      const RegionRows located(regions_of_group(batch, 0, group));
      if (!located.layout().consecutive) break;
      parts.push_back(consecutive_rows(located, width));
    }
    if (parts.size() == groups.size()) return parts;
    parts.clear();
    const Tensor all = batch.rows(0, width);
    for (const WeightGroup& group : groups) parts.push_back(group.of(all));
    return parts;
  }

  // Whether the matrix is treated as shared by all instances. A shared matrix must not be the
  // result of a captured op. A matrix on the left side is often data of the instance. Therefore a
  // matrix on the left side must also require grad, or x must be computed in the block.
  bool is_weight(NodeBuilder& builder) const {
    if (!builder.is_tensor(entry_.x) || !builder.is_tensor(entry_.weight)) return false;
    if (builder.is_computed(entry_.weight) || is_data(builder)) return false;
    return !entry_.column || builder.tensor(entry_.weight).requires_grad() ||
           builder.is_computed(entry_.x);
  }

  // Whether the matrix is data of the instance. The matrix is data if both operands are one tensor
  // (`h @ h.t()`), but not if x consists of a few rows of the matrix. The matrix is also data if it
  // is a pending tensor for a graph input that needs no gradient and is not a weight. Derivative
  // formulas use such tensors (captured_gradient.h), because the gradient of a weight is a product
  // with data of the instance.
  bool is_data(NodeBuilder& builder) const {
    const at::Tensor &x = builder.tensor(entry_.x), &matrix = builder.tensor(entry_.weight);
    const PendingTensor* pending = as_pending(matrix);
    if (pending == nullptr) {
      return as_pending(x) == nullptr && x.numel() == matrix.numel() && x.has_storage() &&
             matrix.has_storage() && x.is_alias_of(matrix);
    }
    const Tape& tape = builder.graph().tape();
    const Value& root = tape.values[tape.values[pending->value()].base];
    return root.is_graph_input() && !root.requires_grad && !tape.graph_inputs[root.index].is_weight;
  }

  // Whether the op accepts an x of this rank.
  bool fits(const NodeBuilder& builder, const std::vector<int64_t>& x) const {
    const std::string& name = builder.op().name;
    const bool any = name == "aten::linear" || name == "aten::matmul";
    if (!entry_.column) return any ? !x.empty() : x.size() == 2;
    if (x.size() == 1) return name != "aten::mm";
    return x.size() == 2 && x[1] == 1 && (any || name == "aten::mm");
  }

  bool bias(NodeBuilder& builder, const Value& x, int64_t m) const {
    if (entry_.bias < 0) return true;
    const auto i = static_cast<size_t>(entry_.bias);
    if (!builder.is_tensor(i)) {
      builder.absent(i);
      return true;
    }
    if (builder.is_computed(i)) return false;
    for (size_t scale = 3; scale < builder.num_arguments(); ++scale) {  // beta and alpha
      if (!builder.argument(scale).toScalar().equal(1)) return false;
    }
    const Value b = builder.weight(i);
    return b.dtype == x.dtype && b.geometry->dim() == 1 && b.geometry->sizes[0] == m;
  }

  static bool has_bias(const BatchView& batch) {
    return batch.num_operands() > 2 && batch.given(2);
  }

  int64_t width(const Value& value) const {
    return entry_.column ? value.geometry->sizes.front() : value.geometry->sizes.back();
  }
  int64_t input_width(const BatchView& batch) const { return width(batch.operand_value(0, 0)); }
  int64_t result_width(const BatchView& batch) const { return width(batch.result_value(0, 0)); }

  Tensor matrix(const BatchView& batch, int64_t m) const {  // the matrix of member m, [K, M]
    return weight(batch, m, entry_.transposed);
  }
  Tensor turned(const BatchView& batch, int64_t m) const {  // its transpose, [M, K]
    return weight(batch, m, !entry_.transposed);
  }
  static Tensor weight(const BatchView& batch, int64_t m, bool turns) {
    const Region w = batch.operand_region(m, 1);
    if (!turns) return region_view(w);
    const auto &sizes = w.geometry->sizes, &strides = w.geometry->strides;
    return strided_view(*w.buffer, {sizes[1], sizes[0]}, {strides[1], strides[0]}, w.offset);
  }

  const Affine& entry_;
};

const Affine kAffine[] = {
    {"aten::linear", 0, 1, 2, true},    {"aten::addmm", 1, 2, 0, false},
    {"aten::mm", 0, 1, -1, false},      {"aten::matmul", 0, 1, -1, false},
    {"aten::mm", 1, 0, -1, true, true}, {"aten::matmul", 1, 0, -1, true, true},
    {"aten::mv", 1, 0, -1, true, true}, {"aten::addmv", 2, 1, 0, true, true},
};

}  // namespace

std::optional<bool> weight_is_by_row(const Rule& rule) {
  const auto* affine = dynamic_cast<const AffineRule*>(&rule);
  return affine != nullptr ? std::optional(affine->by_row()) : std::nullopt;
}

bool is_transposed(const Tape& tape, ValueId id) {
  const Value& value = tape.values[id];
  const Value& base = tape.values[value.base];
  const Geometry &g = *value.geometry, &b = *base.geometry;
  return value.base != id && value.offset == 0 && value.requires_grad == base.requires_grad &&
         b.dim() == 2 && g.dim() == 2 && g.sizes[0] == b.sizes[1] && g.sizes[1] == b.sizes[0] &&
         g.strides[0] == b.strides[1] && g.strides[1] == b.strides[0];
}

RuleTable matmul_rules() {
  RuleTable table;
  for (const Affine& entry : kAffine) table.push_back({entry.op, new AffineRule(entry)});
  table.push_back({"aten::linear", &linear_each_rule()});
  table.push_back({"aten::_grouped_mm", &grouped_mm_rule()});
  return table;
}

}  // namespace autobatch

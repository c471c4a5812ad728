// The rule of elementwise ops that no other rule covers. A batch runs as one call over the elements
// or the rows of all instances.
#include "autobatch/rules/elementwise_layout.h"
#include "autobatch/rules/rowwise.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <algorithm>

namespace autobatch {
namespace {

using at::Tensor;

// Elementwise ops that PyTorch does not tag as pointwise.
constexpr const char* kUntagged[] = {"aten::hardswish",        "aten::log_sigmoid",
                                     "aten::_prelu_kernel",    "aten::where.ScalarOther",
                                     "aten::where.ScalarSelf", "aten::where.Scalar",
                                     "aten::absolute",         "aten::isreal",
                                     "aten::isclose",          "aten::masked_fill.Tensor",
                                     "aten::greater.Tensor",   "aten::less.Tensor",
                                     "aten::multiply.Tensor",  "aten::divide.Tensor",
                                     "aten::subtract.Tensor",  "aten::arctan",
                                     "aten::arctan2"};

// The rule of all ops that PyTorch tags as pointwise, with tensors and constants as arguments.
class TaggedRule final : public RowsCall {
 public:
  bool capture(NodeBuilder& builder) const override {
    for (size_t i = 0; i < builder.num_arguments(); ++i) {
      if (builder.is_tensor(i)) {
        if (builder.tensor(i).unsafeGetTensorImpl()->is_wrapped_number()) {
          builder.python_number(i);
          continue;
        }
        const Value x = builder.operand(i);
        builder.key(dtype_word(x) << 1 | (x.requires_grad ? 1 : 0));
      } else if (builder.argument(i).isTensorList() || !builder.constant(i)) {
        return false;
      }
    }
    if (builder.operands().empty()) return false;
    const auto operands = geometries(builder);
    const std::optional<std::vector<int64_t>> sizes = broadcast(operands);
    if (!sizes.has_value() || promotes(builder, *sizes)) return false;
    const bool row_major = all_row_major(operands);
    if (!row_major && c10::multiply_integers(*sizes) == 0) return false;
    add_spread_key(builder, spread_of(operands, *sizes, row_major), operands, *sizes);
    if (row_major) return true;
    for (const Geometry* g : operands) add_order_key(builder, *g);
    return true;
  }

  // The dimensions have the memory order of the inferred geometry, because the key contains all
  // properties that determine the order.
  const Geometry* geometry_of(NodeBuilder& builder, const Geometry* inferred) const override {
    const std::vector<int64_t> sizes = *broadcast(geometries(builder));
    GeometryTable& table = builder.graph().geometries();
    if (inferred->contiguous) return table.intern_contiguous(sizes);
    return dense_in_order(table, sizes, memory_order(*inferred));
  }

 protected:
  Tensor operand(BatchView& batch, size_t slot) const override {
    const Spread spread = spread_in(batch);
    if (spread == Spread::kRows) return spread_rows(batch, slot);
    if (is_one_element(batch, slot)) return batch.single(slot).reshape({1});
    return spread == Spread::kExpanded ? expanded(batch, slot) : batch.flat_repeated(slot);
  }

  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    const Spread spread = spread_in(batch);
    if (spread == Spread::kRows) return add_spread_rows(batch, slot, grad);
    if (is_one_element(batch, slot)) return batch.add_single(slot, grad);
    spread == Spread::kExpanded ? add_expanded(batch, slot, grad) : batch.add_repeated(slot, grad);
  }

  std::vector<Tensor> gradients(BackwardBatch& batch, const LocalGraph& graph) const override {
    if (spread_in(batch) != Spread::kExpanded) return RowsCall::gradients(batch, graph);
    return {graph.outputs[0].requires_grad() ? gradients_in_order(batch) : Tensor()};
  }

 private:
  using Geometries = c10::SmallVector<const Geometry*, 4>;

  static Geometries geometries(NodeBuilder& builder) {
    Geometries out;
    for (size_t s = 0; s < builder.operands().size(); ++s) {
      out.push_back(given_geometry(builder.graph().tape(), builder.operand_value(s)));
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

  // Whether the result's dtype depends on which operands have no dimensions. In type promotion, a
  // tensor without dimensions has a lower priority.
  static bool promotes(const NodeBuilder& builder, const std::vector<int64_t>& sizes) {
    // The condition of `where` does not affect the dtype.
    const size_t start = builder.op().name == "aten::where.self" ? 1 : 0;
    if (builder.operands().size() <= start) return false;
    const c10::ScalarType first = builder.operand_value(start).dtype;
    bool scalar = false, mixed = false;
    for (size_t s = start; s < builder.operands().size(); ++s) {
      scalar = scalar || builder.operand_value(s).geometry->sizes.empty();
      mixed = mixed || builder.operand_value(s).dtype != first;
    }
    return mixed && scalar && !sizes.empty();
  }

  // Whether all operands are row-major or expanded. The result is then row-major too.
  static bool all_row_major(const Geometries& operands) {
    return std::all_of(operands.begin(), operands.end(),
                       [](const Geometry* g) { return row_major_or_expanded(*g); });
  }

  // Adds the properties of an operand that determine the result's memory order to the key.
  static void add_order_key(NodeBuilder& builder, const Geometry& g) {
    uint64_t ones = 0, zeros = 0;
    for (size_t d = 0; d < g.sizes.size(); ++d) {
      ones |= static_cast<uint64_t>(g.sizes[d] == 1) << d;
      zeros |= static_cast<uint64_t>(g.strides[d] == 0) << d;
    }
    builder.key(ones << 32 | zeros);
    for (const uint8_t d : memory_order(g)) builder.key(d);
  }

  static Spread spread_in(const BatchView& batch) {
    Geometries operands;
    for (size_t s = 0; s < batch.num_operands(); ++s) {
      operands.push_back(given_geometry(batch.tape(), batch.operand_value(0, s)));
    }
    return autobatch::spread_in(batch, operands, all_row_major(operands));
  }
};

}  // namespace

const Rule& rule_of_tagged_ops() {
  static const TaggedRule rule;
  return rule;
}

RuleTable row_rules() {
  RuleTable table;
  for (const char* op : kUntagged) table.push_back({op, &rule_of_tagged_ops()});
  return table;
}

}  // namespace autobatch

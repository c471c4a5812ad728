// cat and stack: copies of pieces, however many and however long.
#include "autobatch/rules.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// The piece of the result that each tensor fills, as a strided region of it.
struct Piece {
  ValueId operand;
  Region region;  // within the result, or its gradient
};

class JoinRule final : public Rule {
 public:
  explicit JoinRule(bool stack) : stack_(stack) {}

  bool saves() const override { return false; }

  bool capture(Draft& draft) const override {
    if (!draft.argument(0).isTensorList() || !draft.argument(1).isInt()) return false;
    draft.variadic(0);
    if (draft.operands().empty()) return false;
    const Value first = draft.operand_value(0);
    const auto rank = first.geometry->dim() + (stack_ ? 1 : 0);
    int64_t dim = draft.argument(1).toInt();
    if (dim < 0) dim += rank;
    if (dim < 0 || dim >= rank) return false;
    at::DimVector sizes(first.geometry->sizes.begin(), first.geometry->sizes.end());
    if (stack_) {
      sizes.insert(sizes.begin() + dim, static_cast<int64_t>(draft.operands().size()));
    } else {
      sizes[dim] = 0;
    }
    for (size_t s = 0; s < draft.operands().size(); ++s) {
      const Value& piece = draft.operand_value(s);
      if (piece.dtype != first.dtype || piece.device != first.device) return false;
      if (!row_major(piece)) return false;  // eager may keep its layout
      if (!fits(piece, first, stack_ ? -1 : dim)) return false;
      if (!stack_) sizes[dim] += piece.geometry->sizes[dim];
    }
    draft.key(dtype_word(first));
    draft.key(static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(dim));
    draft.result(sizes, first.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    GeometryTable geometries;
    const auto pieces = pieces_of(batch, geometries, [&](int64_t m) {
      return batch.store().region(batch.tape(), batch.node(m).first_value);
    });
    copy_pieces(batch, pieces);
  }

  void backward(BackwardBatch& batch) const override {
    GeometryTable geometries;
    const auto pieces =
        pieces_of(batch, geometries, [&](int64_t m) { return batch.grad_region(m, 0); });
    // One gather of the pieces that want a gradient, one addition to their regions.
    Regions from, to;
    for (const Piece& piece : pieces) {
      if (!batch.wanted(piece.operand)) continue;
      from.push_back(piece.region);
      to.push_back(batch.target(piece.operand));
    }
    add_regions(from, to);
  }

 private:
  static bool fits(const Value& piece, const Value& first, int64_t but) {
    const auto& a = piece.geometry->sizes;
    const auto& b = first.geometry->sizes;
    if (a.size() != b.size())
      return false;  // eager lets an empty tensor pass: the generic rule does
    for (size_t d = 0; d < a.size(); ++d) {
      if (static_cast<int64_t>(d) != but && a[d] != b[d]) return false;
    }
    return true;
  }

  template <class ResultRegion>
  std::vector<Piece> pieces_of(BatchView& batch, GeometryTable& geometries,
                               const ResultRegion& result_region) const {
    std::vector<Piece> pieces;
    at::DimVector strides;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Node& node = batch.node(m);
      const Region whole = result_region(m);
      int64_t dim = batch.argument(1).toInt();
      if (dim < 0) dim += whole.geometry->dim();
      int64_t at = 0;
      for (ValueId id : batch.tape().operands_of(node)) {
        const Geometry& g = *batch.tape().values[id].geometry;
        strides.assign(whole.geometry->strides.begin(), whole.geometry->strides.end());
        const int64_t step = strides[dim];
        if (stack_) strides.erase(strides.begin() + dim);
        const Geometry* geometry = geometries.intern(g.sizes, strides);
        pieces.push_back({id, {whole.buffer, whole.offset + at * step, geometry}});
        at += stack_ ? 1 : g.sizes[dim];
      }
    }
    return pieces;
  }

  static void copy_pieces(Batch& batch, const std::vector<Piece>& pieces) {
    Regions from, to;
    for (const Piece& piece : pieces) {
      from.push_back(batch.store().region(batch.tape(), piece.operand));
      to.push_back(piece.region);
    }
    copy_regions(from, to);
  }

  bool stack_;
};

}  // namespace

RuleTable shape_rules() {
  return {{"aten::cat", new JoinRule(false)}, {"aten::stack", new JoinRule(true)}};
}

}  // namespace autobatch

// Copies: cat and stack of any number of pieces of any length, padding, casts, and changes of
// memory format.
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

using at::Tensor;

// Whether eager treats the layout as channels-last (`suggest_memory_format`). The layout may have
// gaps.
bool suggests_channels_last(const Geometry& g) {
  if (g.contiguous) return false;
  return g.dim() == 4   ? c10::is_channels_last_strides_2d<int64_t>(g.sizes, g.strides)
         : g.dim() == 5 ? c10::is_channels_last_strides_3d<int64_t>(g.sizes, g.strides)
                        : false;
}

// --- cat and stack ---

class JoinRule final : public Rule {
 public:
  explicit JoinRule(bool stack) : stack_(stack) {}

  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.argument(0).isTensorList() || !builder.argument(1).isInt()) return false;
    builder.variadic(0);
    const size_t count = builder.operands().size();
    size_t of_first = 0;
    while (of_first + 1 < count && is_left_out(builder.operand_value(of_first))) ++of_first;
    if (of_first == count) return false;
    const Value first = builder.operand_value(of_first);
    const auto rank = first.geometry->dim() + (stack_ ? 1 : 0);
    int64_t dim = builder.argument(1).toInt();
    if (dim < 0) dim += rank;
    if (dim < 0 || dim >= rank) return false;
    at::DimVector sizes(first.geometry->sizes.begin(), first.geometry->sizes.end());
    if (stack_) {
      sizes.insert(sizes.begin() + dim, static_cast<int64_t>(builder.operands().size()));
    } else {
      sizes[dim] = 0;
    }
    if (keeps_layout(builder, dim)) return false;
    for (size_t s = 0; s < count; ++s) {
      const Value& piece = builder.operand_value(s);
      if (piece.dtype != first.dtype || piece.device != first.device) return false;
      if (is_left_out(piece)) continue;
      if (!fits(piece, first, stack_ ? -1 : dim)) return false;
      if (!stack_) sizes[dim] += piece.geometry->sizes[dim];
    }
    builder.key(dtype_word(first));
    builder.key(static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(dim));
    builder.result(sizes, first.dtype);
    return true;
  }

  bool copies_regions() const override { return true; }

  void forward(Batch& batch) const override {
    Regions from, to;
    reserve(batch, from, to);
    for_each_piece(
        batch, [&](int64_t m) { return batch.result_region(m, 0); },
        [&](int64_t m, ValueId operand, const Region& piece) {
          from.push_back(batch.region(m, operand));
          to.push_back(piece);
        },
        [&] { copy_regions(from, to); });
  }

  // In a single call, adds the gradients of all pieces that need a gradient.
  void backward(BackwardBatch& batch) const override {
    Regions from, to;
    reserve(batch, from, to);
    for_each_piece(
        batch, [&](int64_t m) { return batch.grad_region(m, 0); },
        [&](int64_t m, ValueId operand, const Region& piece) {
          if (!batch.wanted(operand)) return;
          from.push_back(piece);
          to.push_back(batch.target_to_add(m, operand));
        },
        [&] { add_regions(from, to); });
  }

 private:
  static bool fits(const Value& piece, const Value& first, int64_t but) {
    const auto& a = piece.geometry->sizes;
    const auto& b = first.geometry->sizes;
    if (a.size() != b.size()) return false;
    for (size_t d = 0; d < a.size(); ++d) {
      if (static_cast<int64_t>(d) != but && a[d] != b[d]) return false;
    }
    return true;
  }

  // `cat` ignores empty tensors of one dimension. The tensors that are not ignored may have any
  // rank.
  bool is_left_out(const Value& piece) const {
    return !stack_ && piece.geometry->sizes == std::vector<int64_t>{0} && !piece.requires_grad;
  }

  // Whether eager's result may have a layout other than row-major. Another layout is possible only
  // if all pieces are channels-last.
  bool keeps_layout(const NodeBuilder& builder, int64_t dim) const {
    for (size_t s = 0; s < builder.operands().size(); ++s) {
      const Value& piece = builder.operand_value(s);
      const Geometry& g = *piece.geometry;
      if (row_major(piece)) return false;
      const bool unsqueezed = stack_ && dim == g.dim();  // an additional dimension of size 1
      if (!suggests_channels_last(g) && !(unsqueezed && (g.dim() == 3 || g.dim() == 4)))
        return false;
    }
    return true;
  }

  static void reserve(const BatchView& batch, Regions& from, Regions& to) {
    const size_t about = static_cast<size_t>(batch.size()) * batch.num_operands();
    from.reserve(about), to.reserve(about);
  }

  // Calls f(member, operand, piece) for each tensor. `piece` is the strided region that the tensor
  // fills in the result or in its gradient. Then calls `finish`, while the geometries of the pieces
  // still exist.
  template <class ResultRegion, class F, class Finish>
  void for_each_piece(const BatchView& batch, const ResultRegion& result_region, const F& f,
                      const Finish& finish) const {
    GeometryTable geometries;
    at::DimVector strides;
    // By operand: the geometries of the operand and of its piece in the previous member. In most
    // cases the current member has the same geometries.
    std::vector<std::pair<const Geometry*, const Geometry*>> known;
    const Geometry* known_of = nullptr;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Region whole = result_region(m);
      if (std::exchange(known_of, whole.geometry) != whole.geometry) known.clear();
      size_t number = 0;
      int64_t dim = batch.argument(1).toInt();
      if (dim < 0) dim += whole.geometry->dim();
      int64_t at = 0;
      for (ValueId id : batch.tape().operands_of(batch.node(m))) {
        const Geometry& g = *batch.tape().values[id].geometry;
        if (g.dim() + (stack_ ? 1 : 0) != whole.geometry->dim()) continue;  // see is_left_out()
        if (number == known.size()) known.emplace_back(nullptr, nullptr);
        auto& [of, geometry] = known[number++];
        if (std::exchange(of, &g) != &g) {
          strides.assign(whole.geometry->strides.begin(), whole.geometry->strides.end());
          if (stack_) strides.erase(strides.begin() + dim);
          geometry = geometries.intern(g.sizes, strides);
        }
        const int64_t step = whole.geometry->strides[static_cast<size_t>(dim)];
        f(m, id, Region{whole.buffer, whole.offset + at * step, geometry});
        at += stack_ ? 1 : g.sizes[dim];
      }
    }
    finish();
  }

  bool stack_;
};

// --- padding ---

// The rule of pad(x, pad, mode, value) and constant_pad_nd(x, pad, value). These ops copy x into a
// filled tensor. With negative padding, they copy a part of x. For each dimension, the signature
// contains at most one of the two padding numbers (before and after x). The other number is
// computed from the sizes of x and of the result. Therefore instances of different lengths that are
// padded to one length form one batch.
class PadRule final : public Rule {
 public:
  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (!builder.argument(1).isIntList()) return false;
    if (builder.num_arguments() == 4 && builder.argument(2).toStringRef() != "constant")
      return false;
    if (!builder.constant(builder.num_arguments() - 1)) return false;
    const auto pads = builder.argument(1).toIntVector();
    const auto rank = static_cast<size_t>(x.geometry->dim());
    if (pads.empty() || pads.size() % 2 != 0 || pads.size() / 2 > rank) return false;
    const bool only_crops = std::ranges::all_of(pads, [](int64_t n) { return n <= 0; });
    if (only_crops ? !row_major(x) : suggests_channels_last(*x.geometry)) return false;
    at::DimVector sizes(x.geometry->sizes.begin(), x.geometry->sizes.end());
    builder.key(dtype_word(x) << 32 | rank << 16 | pads.size());
    for (size_t i = 0; i < pads.size(); i += 2) {
      int64_t& size = sizes[rank - 1 - i / 2];
      const int64_t kept = size + std::min<int64_t>(pads[i], 0) + std::min<int64_t>(pads[i + 1], 0);
      if (kept < 0) return false;  // eager raises the error
      size += pads[i] + pads[i + 1];
      constexpr uint64_t kNoneAfter = 1ull << 63;
      builder.key(follows_from_sizes(pads, i) ? kNoneAfter : static_cast<uint64_t>(pads[i]));
    }
    builder.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    batch.output(0).fill_(fill(batch.signature()));
    const auto pads = batch.argument(1).toIntVector();
    GeometryTable geometries;
    Regions from, to;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Overlap overlap = overlap_of(batch, m, pads);
      from.push_back(overlap.within(batch.operand_region(m, 0), overlap.in_x, geometries));
      to.push_back(overlap.within(batch.result_region(m, 0), overlap.in_result, geometries));
    }
    copy_regions(from, to);
  }

  void backward(BackwardBatch& batch) const override {
    const auto pads = batch.argument(1).toIntVector();
    GeometryTable geometries;
    Regions from, to;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const ValueId x = batch.operand(m, 0);
      if (!batch.wanted(x)) continue;
      const Overlap overlap = overlap_of(batch, m, pads);
      from.push_back(overlap.within(batch.grad_region(m, 0), overlap.in_result, geometries));
      // The gradient of a cropped x must be zero outside of the overlap.
      to.push_back(overlap.is_all_of_x
                       ? batch.target_to_add(m, x)
                       : overlap.within(batch.target(m, x), overlap.in_x, geometries));
    }
    add_regions(from, to);
  }

  std::vector<Tensor> eager(const Signature& signature, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor> places) const override {
    auto pads = signature.arguments[1].toIntVector();
    for (size_t i = 0; i < pads.size(); i += 2) {
      const int64_t d = operands[0].dim() - 1 - static_cast<int64_t>(i / 2);
      const int64_t total = places[0].size(d) - operands[0].size(d);
      if (follows_from_sizes(pads, i)) pads[i] = total;
      pads[i + 1] = total - pads[i];
    }
    return {at::constant_pad_nd(operands[0], pads, fill(signature))};
  }

 private:
  // The part of x that the result contains: the sizes of this part, and its first position in x and
  // in the result.
  struct Overlap {
    at::DimVector sizes, in_x, in_result;
    bool is_all_of_x = true;

    Region within(const Region& whole, at::IntArrayRef begin, GeometryTable& geometries) const {
      const auto& strides = whole.geometry->strides;
      int64_t offset = whole.offset;
      for (size_t d = 0; d < strides.size(); ++d) offset += begin[d] * strides[d];
      return {whole.buffer, offset, geometries.intern(sizes, strides)};
    }
  };

  static Overlap overlap_of(const BatchView& batch, int64_t m, at::IntArrayRef pads) {
    const auto& x = batch.operand_value(m, 0).geometry->sizes;
    const auto& result = batch.result_value(m, 0).geometry->sizes;
    Overlap overlap;
    overlap.sizes.assign(x.begin(), x.end());
    overlap.in_x.assign(x.size(), 0);
    overlap.in_result.assign(x.size(), 0);
    for (size_t i = 0; i < pads.size(); i += 2) {
      const size_t d = x.size() - 1 - i / 2;
      const int64_t total = result[d] - x[d];
      const int64_t before = follows_from_sizes(pads, i) ? total : pads[i];
      overlap.sizes[d] += std::min<int64_t>(before, 0) + std::min<int64_t>(total - before, 0);
      overlap.in_x[d] = std::max<int64_t>(-before, 0);
      overlap.in_result[d] = std::max<int64_t>(before, 0);
      overlap.is_all_of_x = overlap.is_all_of_x && overlap.sizes[d] == x[d];
    }
    return overlap;
  }

  // Whether the padding before x is computed from the sizes. This is possible if there is no
  // padding after x.
  static bool follows_from_sizes(at::IntArrayRef pads, size_t i) {
    return pads[i] != 0 && pads[i + 1] == 0;
  }

  static at::Scalar fill(const Signature& signature) {
    const c10::IValue& value = signature.arguments.back();
    return value.isNone() ? at::Scalar(0) : value.toScalar();
  }
};

// --- clone and _to_copy ---

Tensor cast_gradient(const Tensor& g, at::ScalarType dtype) {
  return (g.is_complex() && !at::isComplexType(dtype) ? at::real(g) : g).to(dtype);
}

// Adds all arguments except the tensor to the key. Returns false if an argument is not a constant,
// or is a device other than the device of x.
bool copies_here(NodeBuilder& builder, const Value& x) {
  for (size_t i = 1; i < builder.num_arguments(); ++i) {
    const c10::IValue& argument = builder.argument(i);
    if (argument.isDevice() && argument.toDevice() != x.device) return false;
    if (!builder.constant(i)) return false;
  }
  return true;
}

// Makes row-major copies of instances of any size.
class CastRule final : public Rule {
 public:
  // `dtype` is the index of the dtype argument, or -1 if the op keeps the operand's dtype. `format`
  // is the index of the memory format argument.
  CastRule(int dtype, size_t format) : dtype_(dtype), format_(format) {}

  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    const c10::IValue& format = builder.argument(format_);
    if (!row_major(x) || !copies_here(builder, x)) return false;
    if (format.isInt() && format.toMemoryFormat() != at::MemoryFormat::Preserve &&
        format.toMemoryFormat() != at::MemoryFormat::Contiguous) {
      return false;
    }
    const bool same = dtype_ < 0 || builder.argument(static_cast<size_t>(dtype_)).isNone();
    builder.key(dtype_word(x) << 8 | static_cast<uint64_t>(x.geometry->dim()));
    builder.result(x.geometry->canonical,
                   same ? x.dtype : builder.argument(static_cast<size_t>(dtype_)).toScalarType());
    return true;
  }

  void forward(Batch& batch) const override {
    (batch.uniform_result(0) ? batch.output_stacked(0) : batch.output(0)).copy_(batch.elements(0));
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor g = batch.uniform_result(0) ? batch.grad_stacked(0) : batch.grad_flat(0);
    batch.add(0, cast_gradient(g, batch.operand_value(0, 0).dtype));
  }

 private:
  int dtype_;
  size_t format_;
};

// Copies instances of one shape if the layout before or after the copy is not row-major.
class RelayoutRule final : public Rule {
 public:
  bool saves() const override { return false; }
  bool infers() const override { return true; }

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (!copies_here(builder, x)) return false;
    builder.key(dtype_word(x) << 1 | (x.requires_grad ? 1 : 0));
    builder.key(x.geometry->canonical);
    return true;
  }

  void forward(Batch& batch) const override { batch.output_stacked(0).copy_(batch.stacked(0)); }

  void backward(BackwardBatch& batch) const override {
    batch.add(0, cast_gradient(batch.grad_stacked(0), batch.operand_value(0, 0).dtype));
  }
};

}  // namespace

const Rule& cat_rule() {
  static const JoinRule rule(false);
  return rule;
}

RuleTable shape_rules() {
  return {{"aten::pad", new PadRule()},
          {"aten::constant_pad_nd", new PadRule()},
          {"aten::cat", &cat_rule()},
          {"aten::stack", new JoinRule(true)},
          {"aten::clone", new CastRule(-1, 1)},
          {"aten::clone", new RelayoutRule()},
          {"aten::_to_copy", new CastRule(1, 6)},
          {"aten::_to_copy", new RelayoutRule()}};
}

}  // namespace autobatch

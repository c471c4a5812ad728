// The op that nn.TransformerEncoderLayer calls in evaluation mode without gradients. The op
// computes a whole encoder layer. Each linear layer of the encoder layer runs as one product over
// the rows of all instances. Attention runs as one call for adjacent instances of one length.
#include "autobatch/common/device_traits.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// One member of a batch: the position of its rows among the rows of all members, the shape of its
// input, and its mask.
struct Piece {
  int64_t first = 0;
  int64_t batch = 1, length = 0;
  Tensor mask;  // true: attention ignores the position; undefined if there is no mask
};

// The arguments of multi-head self-attention.
struct Projection {
  Tensor weight, bias, out_weight, out_bias;
  int64_t heads = 0;
  std::optional<int64_t> mask_type;
};

// Computes self-attention of n instances of one length. `projected` contains queries, keys and
// values, [n, T, 3 width]. Returns [n, T, width].
Tensor attend(const Tensor& projected, int64_t heads, const Tensor& mask,
              std::optional<int64_t> mask_type) {
  const int64_t n = projected.size(0), length = projected.size(1);
  const auto qkv = projected.view({n, length, 3, heads, -1}).permute({2, 0, 3, 1, 4}).unbind();
  if (!mask.defined()) {
    const Tensor out =
        std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(qkv[0], qkv[1], qkv[2]));
    return out.transpose(1, 2).reshape({n, length, -1});
  }
  const double scale = 1 / std::sqrt(static_cast<double>(qkv[0].size(-1)));
  const Tensor scores = at::matmul(qkv[0] * scale, qkv[1].mT());
  const Tensor attention = at::_masked_softmax(scores, mask, 3, mask_type);
  return at::matmul(attention, qkv[2]).transpose(1, 2).reshape({n, length, -1});
}

// Computes self-attention of the rows [R, width], including the input and output projections. The
// rows contain all `pieces`.
Tensor self_attention(const Tensor& rows, const Projection& p, const std::vector<Piece>& pieces) {
  const int64_t width = rows.size(1);
  const Tensor projected = at::addmm(p.bias, rows, p.weight.t());
  Tensor attended = at::empty_like(rows);
  for (size_t i = 0; i < pieces.size();) {
    const Piece& piece = pieces[i];
    size_t end = i + 1;  // adjacent pieces of one length run as one call
    int64_t batch = piece.batch;
    while (!piece.mask.defined() && end < pieces.size() && pieces[end].length == piece.length &&
           !pieces[end].mask.defined()) {
      batch += pieces[end++].batch;
    }
    const int64_t count = batch * piece.length;
    const Tensor from = projected.narrow(0, piece.first, count);
    const Tensor out =
        attend(from.view({batch, piece.length, 3 * width}), p.heads, piece.mask, p.mask_type);
    attended.narrow(0, piece.first, count).copy_(out.view({count, width}));
    i = end;
  }
  return at::addmm(p.out_bias, attended, p.out_weight.t());
}

// Returns the members of a batch and their masks. Operand `slot` is [batch, T, width].
std::vector<Piece> pieces_of(const BatchView& batch, size_t slot, size_t mask) {
  std::vector<Piece> pieces;
  int64_t first = 0;
  for (int64_t m = 0; m < batch.size(); ++m) {
    const auto& sizes = batch.operand_value(m, slot).geometry->sizes;
    Piece piece{first, sizes[0], sizes[1], {}};
    first += sizes[0] * sizes[1];
    if (batch.given(mask)) {
      // As in eager's kernel, every nonzero number in the mask masks a position. This includes
      // -inf.
      piece.mask = region_view(batch.operand_region(m, mask)).to(at::kBool);
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// Captures argument i as a weight. Returns false if the argument does not have these sizes and the
// dtype of x, or if it is computed in the block.
bool is_weight(NodeBuilder& builder, size_t i, const Value& x, at::IntArrayRef sizes) {
  if (!builder.is_tensor(i) || builder.is_computed(i)) return false;
  const Value w = builder.weight(i);
  return w.dtype == x.dtype && sizes == at::IntArrayRef(w.geometry->sizes);
}

// Whether the input is [batch, T, width] with heads of equal width.
bool fits(const Value& x, int64_t width, int64_t heads) {
  const Geometry& g = *x.geometry;
  if (g.dim() != 3 || g.numel == 0 || g.sizes[2] != width || !row_major(x)) return false;
  // Half precision is not covered, because eager's kernel rounds other intermediate results.
  const bool known_type = x.dtype == at::kFloat || x.dtype == at::kDouble;
  return known_type && has_host_memory(x.device) && heads > 0 && width % heads == 0;
}

// Captures the mask as an operand, if there is a mask. Its shape must be [T, T] for type 0, [batch,
// T] for type 1, and [batch, heads, T, T] for type 2. Returns false for a mask of another shape.
bool capture_mask(NodeBuilder& builder, size_t mask, size_t type, const Value& x, int64_t heads) {
  if (!builder.constant(type)) return false;
  if (!builder.is_tensor(mask)) {
    builder.absent(mask);
    return true;
  }
  if (!builder.argument(type).isInt()) return false;
  const Value m = builder.operand(mask);
  const int64_t batch = x.geometry->sizes[0], length = x.geometry->sizes[1];
  const at::DimVector expected[] = {
      {length, length}, {batch, length}, {batch, heads, length, length}};
  const int64_t kind = builder.argument(type).toInt();
  if (kind < 0 || kind > 2 || (m.dtype != at::kBool && m.dtype != x.dtype)) return false;
  builder.key(static_cast<uint64_t>(m.dtype));
  return at::IntArrayRef(m.geometry->sizes) == at::IntArrayRef(expected[kind]);
}

// The rule of _transformer_encoder_layer_fwd.
class EncoderLayerRule final : public Rule {
 public:
  bool heavy() const override { return true; }

  bool capture(NodeBuilder& builder) const override {
    if (builder.context().grad_mode && builder_requires_grad(builder)) return false;
    const Value x = builder.operand(kInput);
    const int64_t width = builder.argument(kWidth).toInt(),
                  heads = builder.argument(kHeads).toInt();
    if (!fits(x, width, heads)) return false;
    const int64_t inner =
        builder.is_tensor(14) && builder.tensor(14).dim() == 2 ? builder.tensor(14).size(0) : -1;
    const at::DimVector sizes[] = {{3 * width, width}, {3 * width}, {width, width}, {width}};
    const at::DimVector more[] = {{width},        {width}, {width},        {width},
                                  {inner, width}, {inner}, {width, inner}, {width}};
    for (size_t i = 0; i < 4; ++i) {
      if (!is_weight(builder, kWeights + i, x, sizes[i])) return false;
    }
    for (size_t i = 0; i < 8; ++i) {
      if (!is_weight(builder, kMore + i, x, more[i])) return false;
    }
    if (!capture_mask(builder, kMask, kMaskType, x, heads)) return false;
    for (size_t i : {kWidth, kHeads, kGelu, kNormFirst, kEpsilon}) {
      if (!builder.constant(i)) return false;
    }
    builder.key(dtype_word(x));
    builder.result(x.geometry->canonical, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t width = batch.argument(kWidth).toInt();
    const double epsilon = batch.argument(kEpsilon).toDouble();
    const bool norm_first = batch.argument(kNormFirst).toBool();
    const bool gelu = batch.argument(kGelu).toBool();
    const auto weight = [&](size_t slot) { return batch.single(slot); };
    const auto norm = [&](const Tensor& t, size_t slot) {
      return at::layer_norm(t, {width}, weight(slot), weight(slot + 1), epsilon);
    };
    const Projection projection{weight(1),
                                weight(2),
                                weight(3),
                                weight(4),
                                batch.argument(kHeads).toInt(),
                                batch.argument(kMaskType).toOptional<int64_t>()};
    const Tensor input = batch.rows(0, width);
    Tensor x = self_attention(norm_first ? norm(input, 5) : input, projection,
                              pieces_of(batch, 0, kMaskSlot));
    x.add_(input);
    if (!norm_first) x = norm(x, 5);
    const Tensor inner =
        at::_addmm_activation(weight(10), norm_first ? norm(x, 7) : x, weight(9).t(), 1, 1, gelu);
    Tensor out = batch.output_rows(0, width);
    at::addmm_out(out, weight(12), inner, weight(11).t());
    out.add_(x);
    if (!norm_first) out.copy_(norm(out, 7));
  }

  // The op is captured only if no gradients are recorded.
  void backward(BackwardBatch&) const override {}

 private:
  // Argument numbers.
  static constexpr size_t kInput = 0, kWidth = 1, kHeads = 2, kWeights = 3, kGelu = 7,
                          kNormFirst = 8, kEpsilon = 9, kMore = 10, kMask = 18, kMaskType = 19;
  // Slot 0 is the input. Slots 1-4 are the projections, slots 5-8 are the norms, and slots 9-12 are
  // the feed-forward part.
  static constexpr size_t kMaskSlot = 13;

  static bool builder_requires_grad(const NodeBuilder& builder) {
    for (size_t i = 0; i < builder.num_arguments(); ++i) {
      if (builder.is_tensor(i) && builder.tensor(i).requires_grad()) return true;
    }
    return false;
  }
};

}  // namespace

RuleTable encoder_rules() {
  return {{"aten::_transformer_encoder_layer_fwd", new EncoderLayerRule()}};
}

}  // namespace autobatch

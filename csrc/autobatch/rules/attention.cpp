// Scaled dot product attention over instances of any length. Instances of different lengths form
// one batch. The batch runs as one or more calls for each length, on views of the slabs. On a CPU,
// these calls take half the time of one call in which all members are padded to one length. A call
// for a few members takes almost as long as one call for each of them, except for short members.
#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/rules/attention_step.h"
#include "autobatch/rules/by_shape.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>

namespace autobatch {
namespace {

using at::Tensor;

// If a query has at most this number of elements, a call costs more than a copy of the operands.
constexpr int64_t kSmallQuery = 2048;

constexpr size_t kQuery = 0, kKey = 1, kValue = 2, kMask = 3;  // argument and operand numbers
constexpr size_t kDropout = 4, kCausal = 5, kScale = 6, kGrouped = 7;

// Returns the members of each call. Members of one size share a call if the operands need not be
// copied for this call, or if the copy costs less than separate calls. Otherwise each member has a
// separate call.
std::vector<Members> calls_for(const BatchView& batch) {
  std::vector<Members> calls;
  for (Members& members : groups_of(batch)) {
    const bool small = batch.operand_value(members.front(), 0).geometry->numel <= kSmallQuery;
    const auto stacked = [&](size_t slot) { return lies_stacked(batch, slot, members); };
    if (small || (stacked(0) && stacked(1) && stacked(2))) {
      calls.push_back(std::move(members));
    } else {
      for (int64_t m : members) calls.push_back({m});
    }
  }
  return calls;
}

// --- helpers of the two attention rules ---

std::optional<double> scale_of(const c10::IValue& scale) { return scale.toOptional<double>(); }

double scale_of(const BatchView& batch) {
  const auto scale = scale_of(batch.argument(kScale));
  const auto width = static_cast<double>(batch.operand_value(0, kQuery).geometry->sizes.back());
  return scale.has_value() ? *scale : 1 / std::sqrt(width);
}

// Converts a boolean mask (true: attend) to the numbers 0 or -inf, which are added to the scores.
// Returns a mask of any other dtype unchanged.
Tensor as_numbers(const Tensor& mask, const Tensor& like) {
  if (mask.scalar_type() != at::kBool) return mask;
  const Tensor zero = at::zeros({}, like.options());
  return at::where(mask, zero, at::full({}, -INFINITY, like.options()));
}

// Returns the mask of these members, expanded to the `sizes` of the scores, [n, .., Tq, Tk]. The
// mask operand may have fewer leading dimensions than the scores. Returns an undefined tensor if
// there is no mask.
Tensor mask_of(const BatchView& batch, const Members& members, at::IntArrayRef sizes,
               const Tensor& like) {
  if (!batch.given(kMask)) return {};
  Tensor mask = as_numbers(stacked_of(batch, kMask, members), like);
  while (mask.dim() < static_cast<int64_t>(sizes.size())) mask = mask.unsqueeze(1);
  return mask.expand(sizes);
}

// Captures query, key, value and mask as operands. Returns false for calls that no rule of this
// file covers.
bool capture_operands(NodeBuilder& builder) {
  for (size_t i = 0; i <= kValue; ++i) {
    if (!builder.is_tensor(i)) return false;
  }
  const Value q = builder.operand(kQuery);
  const Value k = builder.operand(kKey);
  const Value v = builder.operand(kValue);
  if (q.dtype != k.dtype || q.dtype != v.dtype || !is_float(q) || !has_host_memory(q.device))
    return false;
  const auto &a = q.geometry->sizes, &b = k.geometry->sizes, &c = v.geometry->sizes;
  const size_t rank = a.size();
  if (rank < 2 || b.size() != rank || c.size() != rank) return false;
  const bool grouped = builder.argument(kGrouped).toBool();
  for (size_t d = 0; d + 2 < rank; ++d) {
    const bool heads = grouped && d + 3 == rank;  // several query heads may share one key head
    if (b[d] != c[d] || (heads ? b[d] == 0 || a[d] % b[d] != 0 : a[d] != b[d])) return false;
  }
  if (a[rank - 1] != b[rank - 1] || b[rank - 2] != c[rank - 2]) return false;
  if (q.geometry->numel == 0 || k.geometry->numel == 0 || v.geometry->numel == 0) return false;
  builder.key(dtype_word(q) << 8 | rank);
  if (rank > 2) {  // the numbers of heads are part of the key
    builder.key(static_cast<uint64_t>(a[rank - 3]) << 32 | static_cast<uint64_t>(b[rank - 3]));
  }
  builder.key(static_cast<uint64_t>(a.back()) << 32 | static_cast<uint64_t>(c.back()));
  if (!builder.is_tensor(kMask)) {
    builder.absent(kMask);
    return true;
  }
  const Value mask = builder.operand(kMask);
  if (mask.dtype != q.dtype && mask.dtype != at::kBool) return false;
  if (builder.argument(kCausal).toBool()) return false;
  at::DimVector scores(a.begin(), a.end());
  scores.back() = b[rank - 2];
  const auto& m = mask.geometry->sizes;
  if (m.size() < 2 || m.size() > rank) return false;
  for (size_t d = 0; d < m.size(); ++d) {
    if (m[d] != 1 && m[d] != scores[d + rank - m.size()]) return false;
  }
  builder.key(static_cast<uint64_t>(mask.dtype));
  return true;
}

bool mask_requires_grad(const NodeBuilder& builder) {
  return builder.is_tensor(kMask) && builder.operand_value(kMask).requires_grad;
}

// --- the fused kernel, for calls in which eager uses it ---

// The operands are [N, heads, T, width]. The hidden result is the logsumexp of each row of scores,
// [N, T, heads].
class FusedAttentionRule final : public Rule {
 public:
  bool heavy() const override { return true; }

  bool capture(NodeBuilder& builder) const override {
    if (!capture_operands(builder) || builder.argument(kDropout).toDouble() != 0) return false;
    for (size_t i = kDropout; i <= kGrouped; ++i) {
      if (!builder.constant(i)) return false;
    }
    if (mask_requires_grad(builder)) return false;  // the kernel computes no gradient of the mask
    if (builder.operand_value(kQuery).geometry->dim() != 4 || !eager_fuses(builder)) return false;
    const Value& q = builder.operand_value(kQuery);
    // The result of eager's kernel is dense. Its dimensions have the memory order of the query.
    auto sizes = q.geometry->sizes, strides = q.geometry->strides;
    std::swap(sizes[1], sizes[2]);
    std::swap(strides[1], strides[2]);
    strides = at::infer_dense_strides(sizes, strides);
    std::swap(strides[1], strides[2]);
    builder.result(builder.graph().geometries().intern(q.geometry->sizes, strides), q.dtype);
    builder.hidden({sizes[0], sizes[1], sizes[2]}, at::toOpMathType(q.dtype));
    return true;
  }

  void forward(Batch& batch) const override {
    Members steps;
    for (int64_t m = 0; m < batch.size(); ++m) {
      if (is_attention_step(batch, m)) steps.push_back(m);
    }
    if (!steps.empty()) run_attention_steps(batch, steps, scale_of(batch));
    for (const Members& members : calls_for(batch)) {
      if (is_attention_step(batch, members.front())) continue;  // the members have equal sizes
      const Call call(batch, members);
      auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
          call.query, call.key, call.value, 0, call.causal, call.mask, call.scale);
      put_results(batch, 0, members, out);
      put_results(batch, 1, members, sums.transpose(1, 2));
    }
  }

  void backward(BackwardBatch& batch) const override {
    for (const Members& members : calls_for(batch)) {
      const Call call(batch, members);
      const Tensor g = gradients_of(batch, 0, members).flatten(0, 1);
      const Tensor out = results_of(batch, 0, members).flatten(0, 1);
      const Tensor sums = results_of(batch, 1, members).flatten(0, 1).transpose(1, 2);
      const auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          g, call.query, call.key, call.value, out, sums, 0, call.causal, call.mask, call.scale);
      const Tensor gradients[] = {gq, gk, gv};
      for (size_t slot = 0; slot <= kValue; ++slot) {
        if (batch.needs(slot)) add_gradients(batch, slot, members, gradients[slot]);
      }
    }
  }

 private:
  // Whether eager uses the fused kernel for this call. Calls PyTorch's own selection function,
  // which reads only metadata.
  static bool eager_fuses(const NodeBuilder& builder) {
    constexpr int64_t kFlash = 1;
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    const auto mask = builder.argument(kMask).toOptional<Tensor>();
    return at::_fused_sdp_choice(
               builder.tensor(kQuery), builder.tensor(kKey), builder.tensor(kValue), mask, 0,
               builder.argument(kCausal).toBool(), scale_of(builder.argument(kScale)),
               builder.argument(kGrouped).toBool()) == kFlash;
  }

  // The operands of one call. The batch dimensions of all members are merged into one: [n N, heads,
  // T, width].
  struct Call {
    Call(const BatchView& batch, const Members& members)
        : query(stacked_of(batch, kQuery, members).flatten(0, 1)),
          key(stacked_of(batch, kKey, members).flatten(0, 1)),
          value(stacked_of(batch, kValue, members).flatten(0, 1)),
          causal(batch.argument(kCausal).toBool()),
          scale(scale_of(batch.argument(kScale))) {
      const auto n = static_cast<int64_t>(members.size());
      const Tensor numbers = mask_of(
          batch, members, {n, query.size(0) / n, query.size(1), query.size(2), key.size(2)}, query);
      if (numbers.defined()) mask = numbers.flatten(0, 1);
    }
    Tensor query, key, value;
    std::optional<Tensor> mask;
    bool causal;
    std::optional<double> scale;
  };
};

// --- the formula, for all other calls, such as calls with dropout ---

// The operands are [.., T, width]. The hidden results are the attention weights and, with dropout,
// the dropout mask, scaled by 1 / (1 - p).
class PlainAttentionRule final : public Rule {
 public:
  bool heavy() const override { return true; }

  bool capture(NodeBuilder& builder) const override {
    if (!capture_operands(builder) || builder.argument(kGrouped).toBool()) return false;
    for (size_t i = kDropout; i <= kScale; ++i) {
      if (!builder.constant(i)) return false;
    }
    const Value& q = builder.operand_value(kQuery);
    const double p = builder.argument(kDropout).toDouble();
    const auto scale = scale_of(builder.argument(kScale));
    if (mask_requires_grad(builder) && builder.operand_value(kMask).geometry->overlapping)
      return false;
    // For dtypes other than float and double, eager computes in a different dtype.
    if (q.dtype != at::kFloat && q.dtype != at::kDouble) return false;
    if (!(p >= 0 && p <= 1) || (scale.has_value() && !(*scale >= 0))) return false;
    at::DimVector sizes(q.geometry->sizes.begin(), q.geometry->sizes.end());
    sizes.back() = builder.operand_value(kValue).geometry->sizes.back();
    builder.result(sizes, q.dtype);
    sizes.back() = builder.operand_value(kKey).geometry->sizes[sizes.size() - 2];
    builder.hidden(sizes, q.dtype);
    if (p > 0) builder.hidden(sizes, q.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    if (drops(batch)) {
      const double keep = 1 - batch.argument(kDropout).toDouble();
      Tensor mask = batch.output(2);
      keep > 0 ? mask.bernoulli_(keep).div_(keep) : mask.zero_();
    }
    for (const Members& members : calls_for(batch)) {
      const Tensor q = operand(batch, members, kQuery);
      const Tensor k = operand(batch, members, kKey);
      const Tensor scores = scores_of(batch, members, q, k);
      // If the mask excludes all positions of a row, the attention weights of the row are 0.
      const Tensor weights =
          batch.given(kMask) ? at::_safe_softmax(scores, -1) : at::_softmax(scores, -1, false);
      put_results(batch, 1, members, weights);
      const Tensor kept = drops(batch) ? weights * result(batch, members, 2) : weights;
      put_results(batch, 0, members, at::bmm(kept, operand(batch, members, kValue)));
    }
  }

  void backward(BackwardBatch& batch) const override {
    for (const Members& members : calls_for(batch)) {
      const Tensor g = matrices(gradients_of(batch, 0, members));
      const Tensor weights = result(batch, members, 1);
      const Tensor mask = drops(batch) ? result(batch, members, 2) : Tensor();
      if (batch.needs(kValue)) {
        const Tensor kept = mask.defined() ? weights * mask : weights;
        add_gradients(batch, kValue, members, at::bmm(kept.mT(), g));
      }
      const bool adds_to_mask = batch.given(kMask) && batch.needs(kMask);
      if (!batch.needs(kQuery) && !batch.needs(kKey) && !adds_to_mask) continue;
      // Eager saves scaled copies of query and key. The general check of the tensors that eager
      // saves therefore does not cover the original query and key, and both are checked here.
      if (batch.needs(kQuery)) batch.check_unwritten(kKey);
      if (batch.needs(kKey)) batch.check_unwritten(kQuery);
      Tensor gw = at::bmm(g, operand(batch, members, kValue).mT());
      if (mask.defined()) gw.mul_(mask);
      const Tensor gs = at::_softmax_backward_data(gw, weights, -1, weights.scalar_type());
      if (adds_to_mask) add_mask_gradient(batch, members, gs);
      gs.mul_(scale_of(batch));
      if (batch.needs(kQuery)) {
        add_gradients(batch, kQuery, members, at::bmm(gs, operand(batch, members, kKey)));
      }
      if (batch.needs(kKey)) {
        add_gradients(batch, kKey, members, at::bmm(gs.mT(), operand(batch, members, kQuery)));
      }
    }
  }

  std::vector<Tensor> replay(const Signature& signature, at::ArrayRef<Tensor> operands,
                             at::ArrayRef<Tensor> computed) const override {
    if (computed.size() < 3) return eager(signature, operands, computed);
    const auto scale = scale_of(signature.arguments[kScale]);
    const Tensor& q = operands[kQuery];
    const double factor =
        scale.has_value() ? *scale : 1 / std::sqrt(static_cast<double>(q.size(-1)));
    Tensor scores = at::matmul(q * factor, operands[kKey].mT());
    if (signature.arguments[kCausal].toBool()) scores = scores + causal_mask(scores);
    if (operands[kMask].defined()) scores = scores + as_numbers(operands[kMask], q);
    return {at::matmul(at::_safe_softmax(scores, -1) * computed[2], operands[kValue])};
  }

 private:
  static bool drops(const BatchView& batch) { return batch.node(0).num_values > 2; }

  static Tensor causal_mask(const Tensor& like) {
    return at::full({like.size(-2), like.size(-1)}, -INFINITY, like.options()).triu_(1);
  }

  // Reshapes [n, .., rows, columns] to [B, rows, columns].
  static Tensor matrices(const Tensor& t) { return t.reshape({-1, t.size(-2), t.size(-1)}); }
  static Tensor operand(const BatchView& batch, const Members& members, size_t slot) {
    return matrices(stacked_of(batch, slot, members));
  }
  static Tensor result(const BatchView& batch, const Members& members, uint32_t k) {
    return matrices(results_of(batch, k, members));
  }

  static Tensor scores_of(const BatchView& batch, const Members& members, const Tensor& q,
                          const Tensor& k) {
    const double scale = scale_of(batch);
    Tensor mask;
    if (batch.argument(kCausal).toBool()) {
      mask = causal_mask(q.new_empty({q.size(1), k.size(1)}));
    } else if (batch.given(kMask)) {
      const auto& each = batch.operand_value(members.front(), kQuery).geometry->sizes;
      at::DimVector sizes = stacked_sizes(static_cast<int64_t>(members.size()), each);
      sizes.back() = k.size(1);
      mask = matrices(mask_of(batch, members, sizes, q));
    }
    if (mask.defined()) return at::baddbmm(mask, q, k.mT(), 1, scale);
    return at::bmm(q, k.mT()).mul_(scale);
  }

  // Adds the gradient of the mask. `gradient` is the gradient of the scores, [B, Tq, Tk]. The
  // function sums `gradient` over the dimensions along which the mask is broadcast.
  static void add_mask_gradient(BackwardBatch& batch, const Members& members,
                                const Tensor& gradient) {
    const auto n = static_cast<int64_t>(members.size());
    const auto& scores = batch.result_value(members.front(), 1).geometry->sizes;
    const auto& mask = batch.operand_value(members.front(), kMask).geometry->sizes;
    at::DimVector all{n}, broadcast{n};
    all.append(scores.begin(), scores.end());
    broadcast.append(scores.size() - mask.size(), 1);
    broadcast.append(mask.begin(), mask.end());
    add_gradients(batch, kMask, members, at::sum_to(gradient.view(all), broadcast));
  }
};

// --- row-major copies ---

// Makes a row-major copy, as in `x.transpose(0, 1).contiguous()` or inside `reshape`, for instances
// of any length.
class ContiguousRule final : public Rule {
 public:
  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.argument(1).isInt()) return false;
    if (builder.argument(1).toMemoryFormat() != at::MemoryFormat::Contiguous) return false;
    const Value x = builder.operand(0);
    builder.key(dtype_word(x) << 8 | static_cast<uint64_t>(x.geometry->dim()));
    for (size_t d : order_of(*x.geometry)) builder.key(d);
    if (!builder.constant(1)) return false;
    builder.result(x.geometry->sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Regions from;
    for (int64_t m = 0; m < batch.size(); ++m) {
      from.push_back(batch.operand_region(m, 0));
    }
    if (has_host_memory(from.front().buffer->device())) {
      gather_into(from, batch.output(0));
    } else {
      batch.output(0).copy_(batch.flat(0));
    }
  }

  void backward(BackwardBatch& batch) const override { batch.add(0, batch.grad_flat(0)); }

 private:
  // Returns the dimensions in memory order, without dimensions of size 1. The key contains the
  // memory order, because copies with different orders occur at different points of a model. If all
  // these copies had one signature, the policy `agenda` would compute one mean depth for copies at
  // different points of the model.
  static c10::SmallVector<size_t, 6> order_of(const Geometry& g) {
    c10::SmallVector<size_t, 6> order;
    for (size_t d = 0; d < g.sizes.size(); ++d) {
      if (g.sizes[d] != 1) order.push_back(d);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return g.strides[a] > g.strides[b]; });
    return order;
  }
};

}  // namespace

RuleTable attention_rules() {
  return {{"aten::scaled_dot_product_attention", new FusedAttentionRule()},
          {"aten::scaled_dot_product_attention", new PlainAttentionRule()},
          {"aten::clone", new ContiguousRule()}};
}

}  // namespace autobatch

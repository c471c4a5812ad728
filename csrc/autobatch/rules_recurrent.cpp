// Recurrent cells, each as one node with two GEMMs and its gates in place.
#include "autobatch/rules.h"
#include "autobatch/rules_rnn.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

// The weights that lstm_cell and gru_cell share: w_ih [G*H, I], w_hh [G*H, H], b_ih, b_hh [G*H].
// Operands are x, the state(s), then these four.
bool capture_weights(Draft& draft, size_t first, const Value& x, const Value& h, int64_t gates) {
  const int64_t width = gates * h.geometry->sizes.back();
  const int64_t inputs[] = {x.geometry->sizes.back(), h.geometry->sizes.back()};
  for (size_t i = 0; i < 2; ++i) {
    if (!draft.is_tensor(first + i) || draft.is_computed(first + i)) return false;
    const Value w = draft.weight(first + i);
    if (w.dtype != x.dtype || w.geometry->dim() != 2) return false;
    if (w.geometry->sizes[0] != width || w.geometry->sizes[1] != inputs[i]) return false;
  }
  for (size_t i = 2; i < 4; ++i) {
    if (!draft.is_tensor(first + i)) {
      draft.absent(first + i);
      continue;
    }
    if (draft.is_computed(first + i)) return false;
    const Value b = draft.weight(first + i);
    if (b.dtype != x.dtype || b.geometry->dim() != 1 || b.geometry->sizes[0] != width) return false;
  }
  return true;
}

// A state or input: [B, width], B the same for all of a cell.
bool is_rows(const Value& v, const Value& like) {
  return v.geometry->dim() == 2 && v.dtype == like.dtype && is_float(v) && row_major(v) &&
         v.geometry->sizes[0] == like.geometry->sizes[0] && v.geometry->sizes[1] > 0;
}

int64_t width_of(const BatchView& batch, size_t slot) {
  return batch.operand_value(0, slot).geometry->sizes.back();
}

// input W^T + b for the operand in `slot` with weight and bias in theirs: [rows, G*H]
Tensor project(BatchView& batch, size_t slot, size_t weight, size_t bias) {
  const Tensor x = batch.rows(slot, width_of(batch, slot));
  const Tensor w = batch.single(weight).t();
  return batch.given(bias) ? at::addmm(batch.single(bias), x, w) : at::mm(x, w);
}

void project_backward(BackwardBatch& batch, const Tensor& g, size_t slot, size_t weight,
                      size_t bias) {
  if (batch.needs(slot)) batch.add(slot, at::mm(g, batch.single(weight)));
  if (batch.needs(weight)) {
    batch.add_product(weight, g, batch.rows(slot, width_of(batch, slot)));
  }
  if (batch.given(bias) && batch.needs(bias)) batch.add_product(bias, g, Tensor());
}

// lstm_cell(input, hx[2], w_ih, w_hh, b_ih, b_hh) -> (h', c'); operands x, h, c, weights.
// Gates in PyTorch's order i, f, g, o. Hidden results: the activated gates and tanh(c').
class LstmCellRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t k) const override { return k >= 2; }

  bool capture(Draft& draft) const override {
    if (draft.argument(1).toListRef().size() != 2) return false;
    const Value x = draft.operand(0);
    const Value h = draft.operand(1, 0);
    const Value c = draft.operand(1, 1);
    if (!is_rows(x, x) || !is_rows(h, x) || !is_rows(c, x)) return false;
    const int64_t width = h.geometry->sizes[1];
    if (c.geometry->sizes[1] != width || !capture_weights(draft, 2, x, h, 4)) return false;
    draft.key(dtype_word(x));
    const int64_t rows = x.geometry->sizes[0];
    draft.result({rows, width}, x.dtype);
    draft.result({rows, width}, x.dtype);
    draft.hidden({rows, 4 * width}, x.dtype);
    draft.hidden({rows, width}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t width = width_of(batch, 1);
    Tensor gates = batch.output_rows(2, 4 * width);
    at::add_out(gates, project(batch, 0, 3, 5), project(batch, 1, 4, 6));
    gates.narrow(1, 0, 2 * width).sigmoid_();
    gates.narrow(1, 2 * width, width).tanh_();
    gates.narrow(1, 3 * width, width).sigmoid_();
    const auto gate = gates.chunk(4, 1);
    Tensor c = batch.output_rows(1, width);
    Tensor tanh_c = batch.output_rows(3, width);
    Tensor h = batch.output_rows(0, width);
    at::mul_out(c, gate[1], batch.rows(2, width));
    c.addcmul_(gate[0], gate[2]);
    at::tanh_out(tanh_c, c);
    at::mul_out(h, gate[3], tanh_c);
  }

  Chain chain() const override { return {0, 1}; }

  void backward_chain(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const Tensor output = batch.result_rows(2, 4 * width).narrow(1, 3 * width, width);
    const Tensor gh = batch.grad_rows(0, width);
    batch.add_to_result(1, at::tanh_backward(gh * output, batch.result_rows(3, width)));
  }

  Tensor replay_chain(at::ArrayRef<Tensor> operands, const Tensor& c) const override {
    return lstm_output(operands, c);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const Tensor gates = batch.result_rows(2, 4 * width);
    const Tensor tanh_c = batch.result_rows(3, width);
    const auto gate = gates.chunk(4, 1);
    const Tensor gh = batch.grad_rows(0, width);
    Tensor gc = batch.grad_rows(1, width);
    if (!batch.chained()) gc = at::tanh_backward(gh * gate[3], tanh_c).add_(gc);
    Tensor g = at::empty_like(gates);
    const auto out = g.chunk(4, 1);
    out[0].copy_(at::sigmoid_backward(gc * gate[2], gate[0]));
    out[1].copy_(at::sigmoid_backward(gc * batch.rows(2, width), gate[1]));
    out[2].copy_(at::tanh_backward(gc * gate[0], gate[2]));
    out[3].copy_(at::sigmoid_backward(gh * tanh_c, gate[3]));
    if (batch.needs(2)) batch.add(2, gc * gate[1]);
    project_backward(batch, g, 0, 3, 5);
    project_backward(batch, g, 1, 4, 6);
  }
};

// gru_cell(input, hx, w_ih, w_hh, b_ih, b_hh) -> h'; operands x, h, weights. Gates r, z, n:
// n = tanh(x_n + r * h_n), h' = n + z * (h - n). Hidden results: r, z, n and h_n.
class GruCellRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t k) const override { return k != 0; }

  bool capture(Draft& draft) const override {
    const Value x = draft.operand(0);
    const Value h = draft.operand(1);
    if (!is_rows(x, x) || !is_rows(h, x) || !capture_weights(draft, 2, x, h, 3)) return false;
    draft.key(dtype_word(x));
    const int64_t rows = x.geometry->sizes[0];
    const int64_t width = h.geometry->sizes[1];
    draft.result({rows, width}, x.dtype);
    draft.hidden({rows, 4 * width}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const auto from_x = project(batch, 0, 2, 4).chunk(3, 1);
    const auto from_h = project(batch, 1, 3, 5).chunk(3, 1);
    auto kept = batch.output_rows(1, 4 * width).chunk(4, 1);
    at::add_out(kept[0], from_x[0], from_h[0]).sigmoid_();
    at::add_out(kept[1], from_x[1], from_h[1]).sigmoid_();
    kept[3].copy_(from_h[2]);
    at::addcmul_out(kept[2], from_x[2], kept[0], kept[3]).tanh_();
    Tensor out = batch.output_rows(0, width);
    at::lerp_out(out, kept[2], batch.rows(1, width), kept[1]);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const auto kept = batch.result_rows(1, 4 * width).chunk(4, 1);
    const Tensor &r = kept[0], &z = kept[1], &n = kept[2], &h_n = kept[3];
    const Tensor h = batch.rows(1, width);
    const Tensor g = batch.grad_rows(0, width);
    const Tensor gn = at::tanh_backward(g * (1 - z), n);
    const Tensor gz = at::sigmoid_backward(g * (h - n), z);
    const Tensor gr = at::sigmoid_backward(gn * h_n, r);
    if (batch.needs(1)) batch.add(1, g * z);
    project_backward(batch, at::cat({gr, gz, gn}, 1), 0, 2, 4);
    project_backward(batch, at::cat({gr, gz, gn * r}, 1), 1, 3, 5);
  }
};

}  // namespace

RuleTable recurrent_rules() {
  return {{"aten::lstm_cell", new LstmCellRule()}, {"aten::gru_cell", new GruCellRule()}};
}

}  // namespace autobatch

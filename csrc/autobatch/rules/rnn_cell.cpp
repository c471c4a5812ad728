// Recurrent cells. Each call is one node with two GEMMs. On devices with a fused kernel (CUDA),
// eager's fused kernel computes the gates. On other devices, the gates are computed in place.
#include "autobatch/common/pool.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/rules/rnn.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>

namespace autobatch {
namespace {

bool has_kernel_for(const char* op, const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  const auto found = c10::Dispatcher::singleton().findSchema({op, ""});
  return found && found->hasKernelForDispatchKey(c10::computeDispatchKey(
                      tensor.scalar_type(), tensor.layout(), tensor.device()));
}

}  // namespace

bool has_lstm_kernel(const at::Tensor& x) {
  return has_kernel_for("aten::_thnn_fused_lstm_cell", x);
}

namespace {

using at::Tensor;

bool has_gru_kernel(const Tensor& x) { return has_kernel_for("aten::_thnn_fused_gru_cell", x); }

// Adds the weights of lstm_cell or gru_cell to `builder`, as the operands after x and the state(s):
// w_ih [G*H, I], w_hh [G*H, H], b_ih and b_hh [G*H]. Returns false if a weight has other sizes or
// another dtype, or is the result of a captured op.
bool capture_weights(NodeBuilder& builder, size_t first, const Value& x, const Value& h,
                     int64_t gates) {
  const int64_t width = gates * h.geometry->sizes.back();
  const int64_t inputs[] = {x.geometry->sizes.back(), h.geometry->sizes.back()};
  for (size_t i = 0; i < 2; ++i) {
    if (!builder.is_tensor(first + i) || builder.is_computed(first + i)) return false;
    const Value w = builder.weight(first + i);
    if (w.dtype != x.dtype || w.geometry->dim() != 2) return false;
    if (w.geometry->sizes[0] != width || w.geometry->sizes[1] != inputs[i]) return false;
  }
  for (size_t i = 2; i < 4; ++i) {
    if (!builder.is_tensor(first + i)) {
      builder.absent(first + i);
      continue;
    }
    if (builder.is_computed(first + i)) return false;
    const Value b = builder.weight(first + i);
    if (b.dtype != x.dtype || b.geometry->dim() != 1 || b.geometry->sizes[0] != width) return false;
  }
  return true;
}

// Whether the value can be a state or an input. A state or an input is [B, width], with the same B
// for all states and inputs of a cell.
bool is_rows(const Value& v, const Value& like) {
  return v.geometry->dim() == 2 && v.dtype == like.dtype && is_float(v) && row_major(v) &&
         v.geometry->sizes[0] == like.geometry->sizes[0] && v.geometry->sizes[1] > 0;
}

int64_t width_of(const BatchView& batch, size_t slot) {
  return batch.operand_value(0, slot).geometry->sizes.back();
}

// Computes input W^T + bias, [rows, G*H], from the operands in these slots. The bias is optional.
Tensor product(BatchView& batch, size_t slot, size_t weight, const Tensor& bias = Tensor()) {
  WeightCopies* copies = batch.weight_copies(weight);
  const Tensor x = batch.rows(slot, width_of(batch, slot));
  return multiply(x, batch.single(weight).t(), copies, bias);
}

Tensor project(BatchView& batch, size_t slot, size_t weight, size_t bias) {
  return product(batch, slot, weight, batch.given(bias) ? batch.single(bias) : Tensor());
}

void project_backward(BackwardBatch& batch, const Tensor& g, size_t slot, size_t weight,
                      size_t bias) {
  if (batch.needs(slot)) {
    batch.add_computed(slot, {g.size(0), width_of(batch, slot)}, [&](Tensor& to) {
      WeightCopies* copies = batch.weight_copies(weight);
      multiply_into(to, g, batch.single(weight), copies);
    });
  }
  if (batch.needs(weight)) {
    batch.add_product(weight, g, batch.rows(slot, width_of(batch, slot)));
  }
  if (batch.given(bias) && batch.needs(bias)) batch.add_product(bias, g, Tensor());
}

// Whether eager's fused kernel supports the call. The kernel takes both biases or none, and needs
// at least one row.
bool suits_kernel(const NodeBuilder& builder, size_t biases) {
  return builder.is_tensor(biases) == builder.is_tensor(biases + 1) &&
         builder.operand_value(0).geometry->numel > 0;
}

std::optional<Tensor> optional_single(BatchView& batch, size_t slot) {
  return batch.given(slot) ? std::optional<Tensor>(batch.single(slot)) : std::nullopt;
}

// The rule of lstm_cell(input, hx[2], w_ih, w_hh, b_ih, b_hh) -> (h', c'). The operands are x, h, c
// and the weights. The gates are in PyTorch's order i, f, g, o. The hidden result contains the
// activated gates. Backward computes tanh(c') again. If tanh(c') were kept as well, it would be one
// seventh of all values that are kept.
class LstmCellRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t k) const override { return k >= 1; }

  // FusedLstmCellRule also uses this function, because both rules have the same results.
  static bool capture_cell(NodeBuilder& builder) {
    if (builder.argument(1).toListRef().size() != 2) return false;
    const Value x = builder.operand(0);
    const Value h = builder.operand(1, 0);
    const Value c = builder.operand(1, 1);
    if (!is_rows(x, x) || !is_rows(h, x) || !is_rows(c, x)) return false;
    const int64_t width = h.geometry->sizes[1];
    if (c.geometry->sizes[1] != width || !capture_weights(builder, 2, x, h, 4)) return false;
    builder.key(dtype_word(x));
    const int64_t rows = x.geometry->sizes[0];
    builder.result({rows, width}, x.dtype);
    builder.result({rows, width}, x.dtype);
    builder.hidden({rows, 4 * width}, x.dtype);
    return true;
  }

  bool capture(NodeBuilder& builder) const override {
    return !has_lstm_kernel(builder.tensor(0)) && capture_cell(builder);
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
    Tensor h = batch.output_rows(0, width);
    at::mul_out(c, gate[1], batch.rows(2, width));
    c.addcmul_(gate[0], gate[2]);
    at::tanh_out(h, c);
    h.mul_(gate[3]);
  }

  ResultDependency result_dependency() const override { return {0, 1}; }

  void backward_chain(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const Tensor output = batch.result_rows(2, 4 * width).narrow(1, 3 * width, width);
    const Tensor gh = batch.grad_rows(0, width);
    batch.add_to_result(1, at::tanh_backward(gh * output, batch.result_rows(1, width).tanh()));
  }

  Tensor replay_chain(at::ArrayRef<Tensor> operands, const Tensor& c) const override {
    return lstm_output(operands, c);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch, 1);
    Trace step;
    step.gates = batch.result_rows(2, 4 * width);
    step.c = batch.rows(2, width);
    step.extra = batch.result_rows(1, width).tanh();
    const Tensor gh = batch.grad_rows(0, width);
    Tensor gc = batch.grad_rows(1, width);
    Tensor g = pooled_empty(step.gates.numel(), step.gates.options()).view_as(step.gates);
    const bool at_once = !batch.chained() && has_recurrence_kernel(g.device(), g.scalar_type());
    gc = at_once ? lstm_step_backward(step, gh, gc, g)
                 : step_backward(step, batch.chained() ? Tensor() : gh, gh, gc, g);
    if (batch.needs(2)) batch.add(2, std::move(gc));
    project_backward(batch, g, 0, 3, 5);
    project_backward(batch, g, 1, 4, 6);
  }

 private:
  // Computes the step with ATen ops, for any dtype and device. `through` is the gradient of h' that
  // must be propagated to c'. `through` is undefined if `gc` already contains the contribution of
  // this gradient.
  static Tensor step_backward(const Trace& step, const Tensor& through, const Tensor& gh, Tensor gc,
                              Tensor& g) {
    const auto gate = step.gates.chunk(4, 1);
    const auto out = g.chunk(4, 1);
    if (through.defined()) gc = at::tanh_backward(through * gate[3], step.extra).add_(gc);
    out[0].copy_(at::sigmoid_backward(gc * gate[2], gate[0]));
    out[1].copy_(at::sigmoid_backward(gc * step.c, gate[1]));
    out[2].copy_(at::tanh_backward(gc * gate[0], gate[2]));
    out[3].copy_(at::sigmoid_backward(gh * step.extra, gate[3]));
    return gc * gate[1];
  }
};

// Runs lstm_cell with eager's fused kernel. The kernel returns the activated gates, and its
// backward reads c'.
class FusedLstmCellRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t k) const override { return k >= 1; }

  bool capture(NodeBuilder& builder) const override {
    return has_lstm_kernel(builder.tensor(0)) && LstmCellRule::capture_cell(builder) &&
           suits_kernel(builder, 4);
  }

  void forward(Batch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const auto [h, c, gates] =
        at::_thnn_fused_lstm_cell(product(batch, 0, 3), product(batch, 1, 4), batch.rows(2, width),
                                  optional_single(batch, 5), optional_single(batch, 6));
    batch.output_rows(0, width).copy_(h);
    batch.output_rows(1, width).copy_(c);
    batch.output_rows(2, 4 * width).copy_(gates);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const auto made = at::_thnn_fused_lstm_cell_backward_impl(
        batch.grad_rows(0, width), batch.grad_rows(1, width), batch.rows(2, width),
        batch.result_rows(1, width), batch.result_rows(2, 4 * width), /*has_bias=*/false);
    const Tensor& gates = std::get<0>(made);
    if (batch.needs(2)) batch.add(2, std::get<1>(made));
    project_backward(batch, gates, 0, 3, 5);
    project_backward(batch, gates, 1, 4, 6);
  }
};

// The rule of gru_cell(input, hx, w_ih, w_hh, b_ih, b_hh) -> h'. The operands are x, h and the
// weights. The gates are r, z and n, where n = tanh(x_n + r * h_n) and h' = n + z * (h - n). The
// hidden result contains r, z, n and h_n.
class GruCellRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t k) const override { return k != 0; }

  // `kept` is the width of the hidden result, in multiples of the state's width. FusedGruCellRule
  // also uses this function.
  static bool capture_cell(NodeBuilder& builder, int64_t kept) {
    const Value x = builder.operand(0);
    const Value h = builder.operand(1);
    if (!is_rows(x, x) || !is_rows(h, x) || !capture_weights(builder, 2, x, h, 3)) return false;
    builder.key(dtype_word(x));
    const int64_t rows = x.geometry->sizes[0];
    const int64_t width = h.geometry->sizes[1];
    builder.result({rows, width}, x.dtype);
    builder.hidden({rows, kept * width}, x.dtype);
    return true;
  }

  bool capture(NodeBuilder& builder) const override {
    return !has_gru_kernel(builder.tensor(0)) && capture_cell(builder, 4);
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

// Runs gru_cell with eager's fused kernel. The kernel returns r, z, n, h and h_n for backward.
class FusedGruCellRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t k) const override { return k != 0; }

  bool capture(NodeBuilder& builder) const override {
    return has_gru_kernel(builder.tensor(0)) && GruCellRule::capture_cell(builder, 5) &&
           suits_kernel(builder, 4);
  }

  void forward(Batch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const auto [h, kept] =
        at::_thnn_fused_gru_cell(product(batch, 0, 2), product(batch, 1, 3), batch.rows(1, width),
                                 optional_single(batch, 4), optional_single(batch, 5));
    batch.output_rows(0, width).copy_(h);
    batch.output_rows(1, 5 * width).copy_(kept);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = width_of(batch, 1);
    const auto made = at::_thnn_fused_gru_cell_backward(
        batch.grad_rows(0, width), batch.result_rows(1, 5 * width), /*has_bias=*/false);
    if (batch.needs(1)) batch.add(1, std::get<2>(made));
    project_backward(batch, std::get<0>(made), 0, 2, 4);
    project_backward(batch, std::get<1>(made), 1, 3, 5);
  }
};

}  // namespace

RuleTable recurrent_rules() {
  return {{"aten::lstm_cell", new FusedLstmCellRule()},
          {"aten::lstm_cell", new LstmCellRule()},
          {"aten::gru_cell", new FusedGruCellRule()},
          {"aten::gru_cell", new GruCellRule()}};
}

}  // namespace autobatch

// Fused kernels for the gates of recurrent cells. PyTorch has such kernels for accelerators. As in
// PyTorch's RNN.cu, a gate's input is the sum of the products of input and state and of both
// biases.
#include "launch.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& x, const Tensor& h, const Tensor& cx,
                                        const OptionalTensor& b_x, const OptionalTensor& b_h) {
  Launch launch("aten::_thnn_fused_lstm_cell", x.device());
  const Tensor gates = with_bias(launch.argument(x), launch.argument(b_x)) +
                       with_bias(launch.argument(h), launch.argument(b_h));
  const auto parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid();
  const Tensor fresh = parts[2].tanh(), out = parts[3].sigmoid();
  const Tensor cy = forget * launch.argument(cx) + in * fresh;
  const Tensor hy = out * cy.tanh();
  return {launch.result(hy), launch.result(cy),
          launch.result(at::cat({in, forget, fresh, out}, 1))};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const OptionalTensor& grad_hy,
                                                 const OptionalTensor& grad_cy, const Tensor& cx,
                                                 const Tensor& cy, const Tensor& workspace,
                                                 bool has_bias) {
  Launch launch("aten::_thnn_fused_lstm_cell_backward_impl", cx.device());
  const auto parts = launch.argument(workspace).chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &fresh = parts[2], &out = parts[3];
  const auto given = [&](const OptionalTensor& grad) {
    const bool is_there = grad.has_value() && grad->defined();
    return is_there ? launch.argument(*grad) : at::zeros_like(launch.argument(cx));
  };
  const Tensor go = given(grad_hy), tanh = launch.argument(cy).tanh();
  const Tensor gc = go * out * (1 - tanh * tanh) + given(grad_cy);
  const Tensor gates =
      at::cat({gc * fresh * in * (1 - in), gc * launch.argument(cx) * forget * (1 - forget),
               gc * in * (1 - fresh * fresh), go * tanh * out * (1 - out)},
              1);
  const Tensor bias = has_bias ? gates.sum(0) : Tensor();
  return {launch.result(gates), launch.result(gc * forget), launch.result(bias)};
}

std::tuple<Tensor, Tensor> gru(const Tensor& x, const Tensor& h, const Tensor& hx,
                               const OptionalTensor& b_x, const OptionalTensor& b_h) {
  Launch launch("aten::_thnn_fused_gru_cell", x.device());
  const auto from_x = with_bias(launch.argument(x), launch.argument(b_x)).chunk(3, 1);
  const auto from_h = with_bias(launch.argument(h), launch.argument(b_h)).chunk(3, 1);
  const Tensor state = launch.argument(hx);
  const Tensor reset = (from_x[0] + from_h[0]).sigmoid(), in = (from_x[1] + from_h[1]).sigmoid();
  const Tensor fresh = (from_x[2] + reset * from_h[2]).tanh();
  const Tensor hy = fresh + in * (state - fresh);
  return {launch.result(hy),
          launch.result(at::cat({reset, in, fresh, state, from_h[2].contiguous()}, 1))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad_hy,
                                                                const Tensor& workspace,
                                                                bool has_bias) {
  Launch launch("aten::_thnn_fused_gru_cell_backward", grad_hy.device());
  const auto parts = launch.argument(workspace).chunk(5, 1);
  const Tensor &reset = parts[0], &in = parts[1], &fresh = parts[2], &hx = parts[3];
  const Tensor go = launch.argument(grad_hy);
  const Tensor g_in = go * (hx - fresh) * (1 - in) * in;
  const Tensor g_fresh = go * (1 - in) * (1 - fresh * fresh);
  const Tensor g_reset = g_fresh * parts[4] * (1 - reset) * reset;
  const Tensor gates_x = at::cat({g_reset, g_in, g_fresh}, 1);
  const Tensor gates_h = at::cat({g_reset, g_in, g_fresh * reset}, 1);
  const Tensor bias_x = has_bias ? gates_x.sum(0) : Tensor();
  const Tensor bias_h = has_bias ? gates_h.sum(0) : Tensor();
  return {launch.result(gates_x), launch.result(gates_h), launch.result(go * in),
          launch.result(bias_x), launch.result(bias_h)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward);
  m.impl("_thnn_fused_gru_cell", gru);
  m.impl("_thnn_fused_gru_cell_backward", gru_backward);
}

}  // namespace simulated

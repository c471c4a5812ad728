// Recurrent cells that use fused kernels, which PyTorch has only on CUDA. The tests register
// similar kernels for the CPU. These kernels take arguments of the same shapes and use the
// element-wise formulas of PyTorch's kernels (aten/src/ATen/native/cuda/RNN.cu).
#include "scope_test.h"

#include <torch/library.h>

namespace autobatch {
namespace {

using OptionalTensor = std::optional<Tensor>;

int calls = 0;  // calls of all kernels of this file

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Checks what RNN.cu checks of the gates' operands, and the additional assumptions of this file.
void check_gates(const Tensor& x, const Tensor& h, const Tensor& state, const OptionalTensor& b_x,
                 const OptionalTensor& b_h, int64_t factor) {
  ++calls;
  TORCH_CHECK(x.dim() == 2 && x.sizes() == h.sizes() && x.scalar_type() == at::kDouble);
  TORCH_CHECK(state.dim() == 2 && state.numel() == x.size(0) * x.size(1) / factor);
  TORCH_CHECK(x.numel() > 0, "a launch of no blocks");
  TORCH_CHECK(b_x.has_value() == b_h.has_value());
  if (b_x)
    TORCH_CHECK(b_x->dim() == 1 && b_x->numel() == x.size(1) && b_x->sizes() == b_h->sizes());
}

// The operands of the gates by [row][column], for any strides. An absent bias is 0.
class Gates {
 public:
  Gates(const Tensor& x, const Tensor& h, const OptionalTensor& b_x, const OptionalTensor& b_h)
      : x_(x.contiguous()),
        h_(h.contiguous()),
        b_x_(b_x ? b_x->contiguous() : at::zeros({x.size(1)}, x.options())),
        b_h_(b_h ? b_h->contiguous() : at::zeros({x.size(1)}, x.options())) {}
  double from_x(int64_t row, int64_t column) const {
    return x_.const_data_ptr<double>()[row * x_.size(1) + column] +
           b_x_.const_data_ptr<double>()[column];
  }
  double from_h(int64_t row, int64_t column) const {
    return h_.const_data_ptr<double>()[row * x_.size(1) + column] +
           b_h_.const_data_ptr<double>()[column];
  }
  double sum(int64_t row, int64_t column) const {
    return from_x(row, column) + from_h(row, column);
  }

 private:
  Tensor x_, h_, b_x_, b_h_;
};

template <class Visit>
void for_each_element(const Tensor& state, const Visit& visit) {
  for (int64_t row = 0; row < state.size(0); ++row) {
    for (int64_t k = 0; k < state.size(1); ++k) visit(row, k);
  }
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& x, const Tensor& h, const Tensor& cx,
                                        const OptionalTensor& b_x, const OptionalTensor& b_h) {
  check_gates(x, h, cx, b_x, b_h, 4);
  const Gates gates(x, h, b_x, b_h);
  const int64_t width = cx.size(1);
  Tensor hy = at::empty(cx.sizes(), cx.options()), cy = at::empty(cx.sizes(), cx.options());
  Tensor workspace = at::empty(x.sizes(), x.options());
  const auto c = cx.accessor<double, 2>();
  auto h_out = hy.accessor<double, 2>(), c_out = cy.accessor<double, 2>();
  auto kept = workspace.accessor<double, 2>();
  for_each_element(cx, [&](int64_t row, int64_t k) {
    const double i = sigmoid(gates.sum(row, k)), f = sigmoid(gates.sum(row, width + k));
    const double g = std::tanh(gates.sum(row, 2 * width + k));
    const double o = sigmoid(gates.sum(row, 3 * width + k));
    c_out[row][k] = f * c[row][k] + i * g;
    h_out[row][k] = o * std::tanh(c_out[row][k]);
    kept[row][k] = i, kept[row][width + k] = f;
    kept[row][2 * width + k] = g, kept[row][3 * width + k] = o;
  });
  return {hy, cy, workspace};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const OptionalTensor& grad_hy,
                                                 const OptionalTensor& grad_cy, const Tensor& cx,
                                                 const Tensor& cy, const Tensor& workspace,
                                                 bool has_bias) {
  ++calls;
  const auto given = [&](const OptionalTensor& g) {
    if (g && g->defined()) TORCH_CHECK(g->sizes() == cx.sizes());
    return g && g->defined() ? *g : at::zeros(cx.sizes(), cx.options());
  };
  TORCH_CHECK(cx.dim() == 2 && cx.sizes() == cy.sizes() && workspace.dim() == 2);
  TORCH_CHECK(workspace.numel() == cx.numel() * 4);
  const int64_t width = cx.size(1);
  const Tensor gh = given(grad_hy), gc = given(grad_cy);
  Tensor grad_gates = at::empty(workspace.sizes(), cx.options());
  Tensor grad_cx = at::empty(cx.sizes(), cx.options());
  const auto c = cx.accessor<double, 2>(), c_after = cy.accessor<double, 2>();
  const auto kept = workspace.accessor<double, 2>();
  const auto g_h = gh.accessor<double, 2>(), g_c = gc.accessor<double, 2>();
  auto out = grad_gates.accessor<double, 2>(), out_c = grad_cx.accessor<double, 2>();
  for_each_element(cx, [&](int64_t row, int64_t k) {
    const double i = kept[row][k], f = kept[row][width + k];
    const double g = kept[row][2 * width + k], o = kept[row][3 * width + k];
    const double tanh_c = std::tanh(c_after[row][k]);
    const double g_o = g_h[row][k] * tanh_c;
    const double g_cell = g_h[row][k] * o * (1 - tanh_c * tanh_c) + g_c[row][k];
    out[row][k] = g_cell * g * (1 - i) * i;
    out[row][width + k] = g_cell * c[row][k] * (1 - f) * f;
    out[row][2 * width + k] = g_cell * i * (1 - g * g);
    out[row][3 * width + k] = g_o * (1 - o) * o;
    out_c[row][k] = g_cell * f;
  });
  return {grad_gates, grad_cx, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru(const Tensor& x, const Tensor& h, const Tensor& hx,
                               const OptionalTensor& b_x, const OptionalTensor& b_h) {
  check_gates(x, h, hx, b_x, b_h, 3);
  const Gates gates(x, h, b_x, b_h);
  const int64_t width = hx.size(1);
  Tensor hy = at::empty(hx.sizes(), hx.options());
  Tensor workspace = at::empty({hx.size(0), 5 * width}, hx.options());
  const auto state = hx.accessor<double, 2>();
  auto out = hy.accessor<double, 2>(), kept = workspace.accessor<double, 2>();
  for_each_element(hx, [&](int64_t row, int64_t k) {
    const double r = sigmoid(gates.sum(row, k)), z = sigmoid(gates.sum(row, width + k));
    const double h_n = gates.from_h(row, 2 * width + k);
    const double n = std::tanh(gates.from_x(row, 2 * width + k) + r * h_n);
    out[row][k] = n + z * (state[row][k] - n);
    const double values[] = {r, z, n, state[row][k], h_n};
    for (int64_t part = 0; part < 5; ++part) kept[row][part * width + k] = values[part];
  });
  return {hy, workspace};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad_hy,
                                                                const Tensor& workspace,
                                                                bool has_bias) {
  ++calls;
  TORCH_CHECK(grad_hy.dim() == 2 && workspace.dim() == 2);
  TORCH_CHECK(workspace.sizes() == at::IntArrayRef({grad_hy.size(0), 5 * grad_hy.size(1)}));
  const int64_t width = grad_hy.size(1);
  Tensor g_x = at::empty({grad_hy.size(0), 3 * width}, grad_hy.options());
  Tensor g_h = at::empty_like(g_x), g_hx = at::empty(grad_hy.sizes(), grad_hy.options());
  const auto g = grad_hy.accessor<double, 2>(), kept = workspace.accessor<double, 2>();
  auto to_x = g_x.accessor<double, 2>(), to_h = g_h.accessor<double, 2>();
  auto to_hx = g_hx.accessor<double, 2>();
  for_each_element(grad_hy, [&](int64_t row, int64_t k) {
    const double r = kept[row][k], z = kept[row][width + k], n = kept[row][2 * width + k];
    const double h = kept[row][3 * width + k], h_n = kept[row][4 * width + k];
    const double g_n = g[row][k] * (1 - z) * (1 - n * n);
    to_x[row][k] = to_h[row][k] = g_n * h_n * (1 - r) * r;
    to_x[row][width + k] = to_h[row][width + k] = g[row][k] * (h - n) * (1 - z) * z;
    to_x[row][2 * width + k] = g_n;
    to_h[row][2 * width + k] = g_n * r;
    to_hx[row][k] = g[row][k] * z;
  });
  return {g_x, g_h, g_hx, has_bias ? g_x.sum(0) : Tensor(), has_bias ? g_h.sum(0) : Tensor()};
}

// Registers the kernels for the CPU during its lifetime, so that has_lstm_kernel() is true for CPU
// tensors. Eager's cells on the CPU do not use them.
class Kernels {
 public:
  Kernels() : library_(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__) {
    library_.impl("_thnn_fused_lstm_cell", lstm);
    library_.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward);
    library_.impl("_thnn_fused_gru_cell", gru);
    library_.impl("_thnn_fused_gru_cell_backward", gru_backward);
    calls = 0;
  }

 private:
  torch::Library library_;
};

struct Weights {
  Tensor w_ih, w_hh, b_ih, b_hh;

  Tensors all() const {
    return b_ih.defined() ? Tensors{w_ih, w_hh, b_ih, b_hh} : Tensors{w_ih, w_hh};
  }
};

// Each test must use another width, since cached calls stay on the thread.
Weights weights(int64_t gates, int64_t inputs, int64_t width, bool biases) {
  Weights w{leaf({gates * width, inputs}), leaf({gates * width, width}), {}, {}};
  if (biases) w.b_ih = leaf({gates * width}), w.b_hh = leaf({gates * width});
  return w;
}

TEST_CASE("recurrent: lstm_cell by eager's kernel", "[rules][recurrent]") {
  const bool biases = GENERATE(true, false);
  const Kernels kernels;
  const Weights w = weights(4, 3, 7, biases);
  Tensors xs, states;
  for (const int64_t rows : {1, 2, 1, 3}) xs.push_back(leaf({rows, 3}));
  for (const Tensor& x : xs) states.push_back(leaf({x.size(0), 7}));
  const int results = GENERATE(0, 1, 2);  // 0: h' and c', 1: only c', 2: only h' is used
  const Report report = check_program(joined({xs, states, w.all()}), [&] {
    Tensors out;
    for (size_t i = 0; i < xs.size(); ++i) {
      Tensor h = states[i], c = at::tanh(states[i]);
      for (size_t step = 0; step <= i; ++step) {
        std::tie(h, c) = at::lstm_cell(xs[i], {h, c}, w.w_ih, w.w_hh, w.b_ih, w.b_hh);
      }
      if (results != 1) out.push_back(at::tanh(h));
      if (results != 2) out.push_back(at::tanh(c));
    }
    return out;
  });
  const SignatureReport row = row_of(report, "aten::lstm_cell");
  CHECK(row.instances == 10);
  CHECK(row.batches == 4);
  CHECK(calls == 8);  // one per batch, forward and backward
}

TEST_CASE("recurrent: gru_cell by eager's kernel", "[rules][recurrent]") {
  const bool biases = GENERATE(true, false);
  const Kernels kernels;
  const Weights w = weights(3, 5, 9, biases);
  Tensors xs, states;
  for (const int64_t rows : {2, 1, 3}) xs.push_back(leaf({rows, 5}));
  for (const Tensor& x : xs) states.push_back(leaf({x.size(0), 9}));
  const Report report = check_program(joined({xs, states, w.all()}), [&] {
    Tensors out;
    for (size_t i = 0; i < xs.size(); ++i) {
      Tensor h = states[i];
      for (size_t step = 0; step <= i; ++step) {
        h = at::gru_cell(xs[i], h, w.w_ih, w.w_hh, w.b_ih, w.b_hh);
      }
      out.push_back(at::tanh(h));
    }
    return out;
  });
  CHECK(row_of(report, "aten::gru_cell").batches == 3);
  CHECK(calls == 6);
}

// If one kernel computes both h' and c', h' does not depend on c': c' gets no gradient from h'.
TEST_CASE("recurrent: results of eager's kernel are one node's", "[rules][recurrent]") {
  const Kernels kernels;
  const Weights w = weights(4, 3, 11, true);
  const Tensors xs = leaves(3, {1, 3});
  const Tensor zeros = at::zeros({1, 11}, at::kDouble);
  Tensors h, c;
  {
    const BatchScope scope;
    for (const Tensor& x : xs) {
      const auto [hy, cy] = at::lstm_cell(x, {zeros, zeros}, w.w_ih, w.w_hh, w.b_ih, w.b_hh);
      h.push_back(hy), c.push_back(cy);
    }
  }
  CHECK(calls == 1);
  const Tensors grads =
      torch::autograd::grad({loss_of(h)}, joined({c, xs}), {}, std::nullopt, false, true);
  for (size_t i = 0; i < 3; ++i) {
    CHECK_FALSE(grads[i].defined());
    CHECK(grads[3 + i].defined());
  }
}

// The rules do not use the kernel for tensors without rows, which it would refuse.
TEST_CASE("recurrent: what eager's kernel does not take", "[rules][recurrent]") {
  const Kernels kernels;
  const Weights w = weights(4, 3, 13, true);
  const Tensors xs = leaves(2, {0, 3});
  check_program(joined({xs, w.all()}), [&] {
    Tensors out;
    for (const Tensor& x : xs) {
      const Tensor state = at::zeros({0, 13}, at::kDouble);
      out.push_back(std::get<0>(at::lstm_cell(x, {state, state}, w.w_ih, w.w_hh, w.b_ih, w.b_hh)));
    }
    return out;
  });
  CHECK(calls == 0);
}

TEST_CASE("recurrent: a weight computed in the block, where eager has a kernel",
          "[rules][recurrent]") {
  const Kernels kernels;
  const Weights w = weights(4, 3, 15, true);
  const Tensors xs = leaves(2, {2, 3});
  check_program(joined({xs, w.all()}), [&] {
    Tensors out;
    const Tensor w_ih = at::tanh(w.w_ih);
    for (const Tensor& x : xs) {
      const Tensor state = at::zeros({2, 15}, at::kDouble);
      const auto [h, c] = at::lstm_cell(x, {state, state}, w_ih, w.w_hh, w.b_ih, w.b_hh);
      out.push_back(h);
    }
    return out;
  });
  CHECK(calls == 0);
}

}  // namespace
}  // namespace autobatch

#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/kernels/packed_weights.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/rules/rnn.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>

// At -O2, GCC vectorizes only loops that have this pragma.
#ifdef _OPENMP
#define AUTOBATCH_VECTORIZED _Pragma("omp simd")
#else
#define AUTOBATCH_VECTORIZED
#endif

namespace autobatch {
namespace {

using at::Tensor;

// Calls visit(r) for each of n rows of `width` elements.
template <class Visit>
void for_rows(int64_t n, int64_t width, const Visit& visit) {
  constexpr int64_t kGrain = 1 << 15;  // minimum number of elements per thread
  at::parallel_for(0, n, std::max<int64_t>(kGrain / width, 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) visit(r);
  });
}

// The rows of a tensor [rows, width]. Each row is contiguous. `data` is null if the tensor is
// undefined.
template <class T>
struct Rows {
  explicit Rows(const Tensor& t)
      : data(t.defined() ? t.data_ptr<T>() : nullptr), stride(t.defined() ? t.stride(0) : 0) {}
  T* operator[](int64_t r) const { return data + r * stride; }
  T* data;
  int64_t stride;
};

// --- forward, after the gates are activated ---

// Computes c in place from the gates i, f, g, o. If `before` is defined, first copies c to
// `before`.
template <class T>
void lstm_cell_state(const Tensor& gates, const Tensor& c, const Tensor& before) {
  const int64_t width = c.size(1);
  const Rows<T> g(gates), state(c), kept(before);
  for_rows(c.size(0), width, [&](int64_t r) {
    const T* __restrict gate = g[r];
    T* __restrict out = state[r];
    if (kept.data != nullptr) std::copy_n(out, width, kept[r]);
    AUTOBATCH_VECTORIZED
    for (int64_t j = 0; j < width; ++j) {
      out[j] = gate[width + j] * out[j] + gate[j] * gate[2 * width + j];
    }
  });
}

template <class T>
void lstm_hidden_state(const Tensor& gates, const Tensor& tanh_c, const Tensor& h) {
  const int64_t width = tanh_c.size(1);
  const Rows<T> g(gates), squashed(tanh_c), state(h);
  for_rows(h.size(0), width, [&](int64_t r) {
    const T* __restrict o = g[r] + 3 * width;
    const T* __restrict from = squashed[r];
    T* __restrict out = state[r];
    AUTOBATCH_VECTORIZED
    for (int64_t j = 0; j < width; ++j) out[j] = o[j] * from[j];
  });
}

// The gates are r, z and n, where n = tanh(x_n + r * h_n) and h' = n + z * (h - n). Adds r * h_n to
// x_n.
template <class T>
void gru_new_gate(const Tensor& gates, const Tensor& from_h, const Tensor& kept) {
  const int64_t width = gates.size(1) / 3;
  const Rows<T> g(gates), recurrent(from_h), copy(kept);
  for_rows(gates.size(0), width, [&](int64_t r) {
    T* __restrict gate = g[r];
    const T* __restrict h_n = recurrent[r] + 2 * width;
    if (copy.data != nullptr) std::copy_n(h_n, width, copy[r]);
    AUTOBATCH_VECTORIZED
    for (int64_t j = 0; j < width; ++j) gate[2 * width + j] += gate[j] * h_n[j];
  });
}

template <class T>
void gru_hidden_state(const Tensor& gates, const Tensor& h) {
  const int64_t width = h.size(1);
  const Rows<T> g(gates), state(h);
  for_rows(h.size(0), width, [&](int64_t r) {
    const T* __restrict z = g[r] + width;
    const T* __restrict n = g[r] + 2 * width;
    T* __restrict out = state[r];
    AUTOBATCH_VECTORIZED
    for (int64_t j = 0; j < width; ++j) out[j] = n[j] + z[j] * (out[j] - n[j]);
  });
}

// --- backward: gradients of the gates and the previous c, from gradients of the new h and c ---

template <class T>
void lstm_backward(const Trace& trace, const Tensor& gh, const Tensor& gc, const Tensor& out) {
  const int64_t width = gc.size(1);
  const Rows<T> gates(trace.gates), before(trace.c), squashed(trace.extra);
  const Rows<T> dh(gh), dc(gc), grads(out);
  for_rows(gc.size(0), width, [&](int64_t r) {
    const T* __restrict i = gates[r];
    const T* __restrict f = i + width;
    const T* __restrict g = f + width;
    const T* __restrict o = g + width;
    const T* __restrict c = before[r];
    const T* __restrict tanh_c = squashed[r];
    const T* __restrict h_grad = dh[r];
    T* __restrict c_grad = dc[r];
    T* __restrict gi = grads[r];
    T* __restrict gf = gi + width;
    T* __restrict gg = gf + width;
    T* __restrict go = gg + width;
    AUTOBATCH_VECTORIZED
    for (int64_t j = 0; j < width; ++j) {
      const T d = c_grad[j] + h_grad[j] * o[j] * (1 - tanh_c[j] * tanh_c[j]);
      gi[j] = d * g[j] * (1 - i[j]) * i[j];
      gf[j] = d * c[j] * (1 - f[j]) * f[j];
      gg[j] = d * i[j] * (1 - g[j] * g[j]);
      go[j] = h_grad[j] * tanh_c[j] * (1 - o[j]) * o[j];
      c_grad[j] = d * f[j];
    }
  });
}

// Replaces `gh` with the part of the gradient that reaches the previous h directly and not through
// the gates.
template <class T>
void gru_backward(const Trace& trace, const Tensor& gh, const Tensor& from_x,
                  const Tensor& from_h) {
  const int64_t width = gh.size(1);
  const Rows<T> gates(trace.gates), before(trace.h), recurrent(trace.extra);
  const Rows<T> dh(gh), x_grads(from_x), h_grads(from_h);
  for_rows(gh.size(0), width, [&](int64_t row) {
    const T* __restrict r = gates[row];
    const T* __restrict z = r + width;
    const T* __restrict n = z + width;
    const T* __restrict h = before[row];
    const T* __restrict h_n = recurrent[row];
    T* __restrict h_grad = dh[row];
    T* __restrict gx = x_grads[row];
    T* __restrict gr = h_grads[row];
    AUTOBATCH_VECTORIZED
    for (int64_t j = 0; j < width; ++j) {
      const T gn = h_grad[j] * (1 - z[j]) * (1 - n[j] * n[j]);
      const T gz = h_grad[j] * (h[j] - n[j]) * (1 - z[j]) * z[j];
      const T g = gn * h_n[j] * (1 - r[j]) * r[j];
      gx[j] = gr[j] = g;
      gx[width + j] = gr[width + j] = gz;
      gx[2 * width + j] = gn;
      gr[2 * width + j] = gn * r[j];
      h_grad[j] *= z[j];
    }
  });
}

// --- steps ---

Tensor part(const Tensor& t, int64_t begin, int64_t n) {
  return t.defined() ? t.narrow(0, begin, n) : t;
}

Trace part(const Trace& t, int64_t begin, int64_t n) {
  return {part(t.gates, begin, n), part(t.h, begin, n), part(t.c, begin, n),
          part(t.extra, begin, n), part(t.unprojected, begin, n)};
}

// Data that all steps use: buffers whose content is needed only within one step, and copies of
// weights.
struct Scratch {
  Tensor tanh_c, unprojected, from_h;
  WeightCopies* copies = nullptr;
};

Scratch scratch_for(const Direction& d, int64_t sequences, bool kept) {
  const int64_t width = d.w_hh.size(0) / gates_of(d.cell);
  Scratch s;
  if (d.cell == Cell::kLstm && !kept) {
    s.tanh_c = at::empty({sequences, width}, d.w_hh.options());
    if (d.w_hr.defined()) s.unprojected = at::empty({sequences, width}, d.w_hh.options());
  }
  if (d.cell == Cell::kGru) s.from_h = at::empty({sequences, 3 * width}, d.w_hh.options());
  return s;
}

// Computes one step. `gates` contains the input's contribution and becomes the activated gates. `h`
// and `c` are the states of the sequences that have not ended. Both states are updated in place.
void lstm_step(const Direction& d, Tensor& gates, Tensor h, const Tensor& c, const Trace& kept,
               const Scratch& scratch) {
  const int64_t n = c.size(0), width = c.size(1);
  add_multiplied(gates, h, d.w_hh.t(), scratch.copies);
  gates.narrow(1, 0, 2 * width).sigmoid_();
  gates.narrow(1, 2 * width, width).tanh_();
  gates.narrow(1, 3 * width, width).sigmoid_();
  Tensor tanh_c = kept.extra.defined() ? kept.extra : part(scratch.tanh_c, 0, n);
  Tensor out = h;
  if (d.w_hr.defined()) {
    out = kept.unprojected.defined() ? kept.unprojected : part(scratch.unprojected, 0, n);
  }
  AT_DISPATCH_FLOATING_TYPES(c.scalar_type(), "lstm", [&] {
    lstm_cell_state<scalar_t>(gates, c, kept.c);
    at::tanh_out(tanh_c, c);
    lstm_hidden_state<scalar_t>(gates, tanh_c, out);
  });
  if (d.w_hr.defined()) multiply_into(h, out, d.w_hr.t(), scratch.copies);
}

void gru_step(const Direction& d, Tensor& gates, const Tensor& h, const Trace& kept,
              const Scratch& scratch) {
  const int64_t width = h.size(1);
  Tensor from_h = part(scratch.from_h, 0, h.size(0));
  multiply_into(from_h, h, d.w_hh.t(), scratch.copies, d.b_hh);
  gates.narrow(1, 0, 2 * width).add_(from_h.narrow(1, 0, 2 * width)).sigmoid_();
  AT_DISPATCH_FLOATING_TYPES(h.scalar_type(), "gru", [&] {
    gru_new_gate<scalar_t>(gates, from_h, kept.extra);
    gates.narrow(1, 2 * width, width).tanh_();
    gru_hidden_state<scalar_t>(gates, h);
  });
}

void plain_step(const Direction& d, Tensor& gates, const Tensor& h, const Scratch& scratch) {
  add_multiplied(gates, h, d.w_hh.t(), scratch.copies);
  d.cell == Cell::kTanh ? gates.tanh_() : gates.relu_();
  h.copy_(gates);
}

Trace trace_for(const Direction& d, const Tensor& gates) {
  const int64_t rows = gates.size(0), width = gates.size(1) / gates_of(d.cell);
  Trace t;
  t.gates = gates;
  t.h = at::empty({rows, d.w_hh.size(1)}, gates.options());
  if (d.cell == Cell::kLstm) t.c = at::empty({rows, width}, gates.options());
  if (gates_of(d.cell) > 1) t.extra = at::empty({rows, width}, gates.options());
  if (d.w_hr.defined()) t.unprojected = at::empty({rows, width}, gates.options());
  return t;
}

// Computes the input's contribution to the gates of all steps. The contribution includes b_ih and,
// except for GRU, b_hh.
Tensor project_input(const Direction& d, const Tensor& x) {
  const bool one_sum = d.b_ih.defined() && d.cell != Cell::kGru;
  return multiply(x, d.w_ih.t(), nullptr, one_sum ? d.b_ih + d.b_hh : d.b_ih);
}

// Returns the indices of the steps in the order of execution.
std::vector<int64_t> order_of(const Packing& packing, bool downwards) {
  std::vector<int64_t> order(packing.steps());
  std::iota(order.begin(), order.end(), 0);
  if (downwards) std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace

Tensor lstm_output(at::ArrayRef<Tensor> operands, const Tensor& c) {
  const int64_t width = c.size(-1);
  const auto project = [&](size_t input, size_t weight, size_t bias) {
    const bool given = bias < operands.size() && operands[bias].defined();
    const std::optional<Tensor> b =
        given ? std::optional(operands[bias].narrow(0, 3 * width, width)) : std::nullopt;
    return at::linear(operands[input], operands[weight].narrow(0, 3 * width, width), b);
  };
  return at::sigmoid(project(0, 3, 5) + project(1, 4, 6)) * at::tanh(c);
}

bool has_recurrence_kernel(c10::Device device, c10::ScalarType dtype) {
  return has_host_memory(device) && (dtype == at::kFloat || dtype == at::kDouble);
}

Tensor lstm_step_backward(const Trace& step, const Tensor& gh, const Tensor& gc,
                          const Tensor& gates) {
  Tensor before = pooled_empty(gc.numel(), gc.options()).view_as(gc).copy_(gc);
  AT_DISPATCH_FLOATING_TYPES(gc.scalar_type(), "lstm_step_backward",
                             [&] { lstm_backward<scalar_t>(step, gh, before, gates); });
  return before;
}

Trace Trace::at_rows(const Tensor& rows) const {
  const auto pick = [&](const Tensor& t) { return t.defined() ? t.index_select(0, rows) : t; };
  return {pick(gates), pick(h), pick(c), pick(extra), pick(unprojected)};
}

void run_recurrence(const Packing& packing, const Direction& d, const Tensor& x, const Tensor& y,
                    const Tensor& h, const Tensor& c, Trace* trace) {
  const Tensor gates = project_input(d, x);
  if (trace != nullptr) *trace = trace_for(d, gates);
  WeightCopies copies;
  Scratch scratch = scratch_for(d, packing.sequences(), trace != nullptr);
  scratch.copies = &copies;
  for (int64_t t : order_of(packing, d.reverse)) {
    const int64_t begin = packing.begin(t), n = packing.count(t);
    Tensor gate = part(gates, begin, n);
    const Tensor state = part(h, 0, n);
    const Trace kept = trace != nullptr ? part(*trace, begin, n) : Trace();
    if (trace != nullptr) kept.h.copy_(state);
    switch (d.cell) {
      case Cell::kLstm:
        lstm_step(d, gate, state, part(c, 0, n), kept, scratch);
        break;
      case Cell::kGru:
        gru_step(d, gate, state, kept, scratch);
        break;
      default:
        plain_step(d, gate, state, scratch);
    }
    part(y, begin, n).copy_(state);
  }
}

GateGradients run_recurrence_backward(const Packing& packing, const Direction& d,
                                      const Trace& trace, const Tensor& gy, const Tensor& gh,
                                      const Tensor& gc, bool initial) {
  GateGradients out;
  out.from_x = at::empty_like(trace.gates);
  out.from_h = d.cell == Cell::kGru ? at::empty_like(trace.gates) : out.from_x;
  if (d.w_hr.defined()) out.projected = at::empty_like(trace.h);
  for (int64_t t : order_of(packing, !d.reverse)) {
    const int64_t begin = packing.begin(t), n = packing.count(t);
    Tensor gx = part(out.from_x, begin, n);
    const Tensor g_rec = part(out.from_h, begin, n);
    const Trace kept = part(trace, begin, n);
    Tensor g = part(gh, 0, n);
    g.add_(part(gy, begin, n));
    Tensor g_hidden = g;
    if (d.w_hr.defined()) {
      part(out.projected, begin, n).copy_(g);
      g_hidden = multiply(g, d.w_hr, nullptr);
    }
    AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "recurrence_backward", [&] {
      if (d.cell == Cell::kLstm) {
        lstm_backward<scalar_t>(kept, g_hidden, part(gc, 0, n), gx);
      } else if (d.cell == Cell::kGru) {
        gru_backward<scalar_t>(kept, g_hidden, gx, g_rec);
      } else if (d.cell == Cell::kTanh) {
        at::tanh_backward_out(gx, g, kept.gates);
      } else {
        at::threshold_backward_out(gx, g, kept.gates, 0);
      }
    });
    // Sequences that start at this step have no previous step. The gradient of their initial h is
    // computed only if `initial` is set.
    const int64_t before = initial ? n : d.reverse ? packing.count(t + 1) : t > 0 ? n : 0;
    if (before == 0) continue;
    Tensor g_before = part(g, 0, before);
    const Tensor through = part(g_rec, 0, before);
    if (d.cell == Cell::kGru) {
      add_multiplied(g_before, through, d.w_hh);
    } else {
      multiply_into(g_before, through, d.w_hh, nullptr);
    }
  }
  return out;
}

}  // namespace autobatch

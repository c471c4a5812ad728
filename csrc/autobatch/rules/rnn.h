// The recurrences of nn.LSTM, nn.GRU and nn.RNN over sequences of different lengths: one direction
// of one layer, forward and backward. The input's part of the gates is one GEMM over all rows, as
// are the gradients of weights and input; a step is one GEMM with the recurrent weight and a few
// passes over its gates.
#pragma once

#include "autobatch/rules/packed_sequence.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace autobatch {

enum class Cell : uint8_t { kLstm, kGru, kTanh, kRelu };

inline int64_t gates_of(Cell cell) { return cell == Cell::kLstm ? 4 : cell == Cell::kGru ? 3 : 1; }

// One direction of one layer. What was not given is undefined.
struct Direction {
  Cell cell = Cell::kLstm;
  bool reverse = false;
  at::Tensor w_ih, w_hh, b_ih, b_hh;
  at::Tensor w_hr;  // projects h (LSTM only)
};

// Whether eager's lstm_cell has a kernel for its gates where x is (CUDA): h' and c' are then
// results of one autograd node, and c' is none that h' is computed from.
bool has_lstm_kernel(const at::Tensor& x);

// lstm_cell's h' from its operands (x, h, c, weights) and its c', by ops that autograd sees.
at::Tensor lstm_output(at::ArrayRef<at::Tensor> operands, const at::Tensor& c);

// What backward reads, by packed row.
struct Trace {
  at::Tensor gates;        // activated
  at::Tensor h, c;         // before the step
  at::Tensor extra;        // LSTM: tanh(c) after it; GRU: the new gate's part of h
  at::Tensor unprojected;  // h before w_hr

  // The same of some rows.
  Trace at_rows(const at::Tensor& rows) const;
};

// Whether the functions below take such tensors.
bool has_recurrence_kernel(c10::Device device, c10::ScalarType dtype);

// One LSTM step backward: from the gradients of h and c after it, [rows, width], to those of the
// gates, written to `gates`, and of c before it, which it returns.
at::Tensor lstm_step_backward(const Trace& step, const at::Tensor& gh, const at::Tensor& gc,
                              const at::Tensor& gates);

// Steps through the packed rows `x`; writes h after each step to the rows of `y` (which may be
// columns of something wider). `h` and `c`, by place, are the initial states and become the final
// ones. With `trace`, what backward needs is kept there.
void run_recurrence(const Packing& packing, const Direction& d, const at::Tensor& x,
                    const at::Tensor& y, const at::Tensor& h, const at::Tensor& c, Trace* trace);

// Gradients, by packed row.
struct GateGradients {
  at::Tensor from_x, from_h;  // of what the input, and h, add to the gates; one tensor but for GRU
  at::Tensor projected;       // of h, if it was projected
};

// The reverse: `gy` is the gradient of `y`; `gh` and `gc`, by place, are those of the final states
// and become those of the initial ones, if `initial` are wanted.
GateGradients run_recurrence_backward(const Packing& packing, const Direction& d,
                                      const Trace& trace, const at::Tensor& gy,
                                      const at::Tensor& gh, const at::Tensor& gc, bool initial);

}  // namespace autobatch

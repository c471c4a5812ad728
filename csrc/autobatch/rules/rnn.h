// The recurrences of nn.LSTM, nn.GRU and nn.RNN over sequences of different lengths. A call runs
// one direction of one layer, in forward or in backward. One GEMM over all rows computes the
// input's contribution to the gates. In backward, one GEMM computes the gradient of each weight,
// and one GEMM computes the gradient of the input. A step of the recurrence is one GEMM with the
// recurrent weight, followed by a few passes over the gates.
#pragma once

#include "autobatch/rules/packed_sequence.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace autobatch {

enum class Cell : uint8_t { kLstm, kGru, kTanh, kRelu };

inline int64_t gates_of(Cell cell) { return cell == Cell::kLstm ? 4 : cell == Cell::kGru ? 3 : 1; }

// The weights of one direction of one layer. A tensor that was not given is undefined.
struct Direction {
  Cell cell = Cell::kLstm;
  bool reverse = false;
  at::Tensor w_ih, w_hh, b_ih, b_hh;
  at::Tensor w_hr;  // projects h (LSTM only)
};

// Whether eager's lstm_cell has a fused kernel for its gates on the device of x (CUDA). In eager,
// h' and c' are then results of one autograd node, and h' is not computed from c'.
bool has_lstm_kernel(const at::Tensor& x);

// Computes lstm_cell's h' from its operands (x, h, c, weights) and its c', with ops that autograd
// records.
at::Tensor lstm_output(at::ArrayRef<at::Tensor> operands, const at::Tensor& c);

// The values that backward reads, by packed row.
struct Trace {
  at::Tensor gates;        // the activated gates
  at::Tensor h, c;         // the states before the step
  at::Tensor extra;        // LSTM: tanh(c) after the step; GRU: h's contribution to the new gate
  at::Tensor unprojected;  // h after the step, before the projection by w_hr

  // Returns the values of the packed rows with the numbers `rows`.
  Trace at_rows(const at::Tensor& rows) const;
};

// Whether the functions below support tensors of this device and dtype.
bool has_recurrence_kernel(c10::Device device, c10::ScalarType dtype);

// Computes one LSTM step backward. `gh` and `gc`, [rows, width], are the gradients of h and c after
// the step. Writes the gradients of the gates to `gates` and returns the gradient of c before the
// step.
at::Tensor lstm_step_backward(const Trace& step, const at::Tensor& gh, const at::Tensor& gc,
                              const at::Tensor& gates);

// Runs the recurrence over the packed rows `x` and writes h after each step to the rows of `y`,
// which may be columns of a wider tensor. `h` and `c` contain the initial states and are
// overwritten with the final states. Their row s is the state of the sequence at place s. If
// `trace` is not null, the function stores the values that backward needs in `*trace`.
void run_recurrence(const Packing& packing, const Direction& d, const at::Tensor& x,
                    const at::Tensor& y, const at::Tensor& h, const at::Tensor& c, Trace* trace);

// Gradients, by packed row.
struct GateGradients {
  // Gradient of the input's contribution to the gates, and gradient of h's contribution. Both are
  // the same tensor, except for GRU.
  at::Tensor from_x, from_h;
  at::Tensor projected;  // gradient of the projected h; undefined without w_hr
};

// Computes the backward of run_recurrence. `gy` is the gradient of `y`. `gh` and `gc` are the
// gradients of the final states. Their row s is the gradient for the sequence at place s. If
// `initial` is set, the function overwrites `gh` and `gc` with the gradients of the initial states.
GateGradients run_recurrence_backward(const Packing& packing, const Direction& d,
                                      const Trace& trace, const at::Tensor& gy,
                                      const at::Tensor& gh, const at::Tensor& gc, bool initial);

}  // namespace autobatch

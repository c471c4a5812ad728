// The methods and functions that have a fast path to capture (direct_calls.h). Models call these
// methods and functions most often. Elementwise ops of one tensor are listed in elementwise_ops.inc
// instead.
#pragma once

#include <array>
#include <cstdint>

namespace autobatch {

enum class Binding : uint8_t { kMethod, kTorch, kNN };

struct DirectName {
  Binding binding;
  const char* name;
  std::array<const char*, 2> ops;  // overloads, in the order in which the binding tries them
  bool number = false;             // whether the second operand may be a Python number
  bool whole = false;              // whether all arguments must be given, because the binding's
                                   // defaults differ from the schema's defaults
};

inline constexpr DirectName kNames[] = {
#define METHOD(op) {Binding::kMethod, #op, {#op}},
#define TORCH(op) {Binding::kTorch, #op, {#op}},
#define NN(op) {Binding::kNN, #op, {#op}},
#define FUSED_ELEMENTWISE_OP(Name, op, reads, formula, gradient, forward, backward, into, ...) \
  __VA_ARGS__
#define ELEMENTWISE_OP(op, reads, forward, backward, into, ...) __VA_ARGS__
#include "autobatch/kernels/elementwise_ops.inc"
    {Binding::kMethod, "__add__", {"add.Tensor"}, true},
    {Binding::kMethod, "__radd__", {"add.Tensor"}, true},
    {Binding::kMethod, "__sub__", {"sub.Tensor"}, true},
    {Binding::kMethod, "__mul__", {"mul.Tensor"}, true},
    {Binding::kMethod, "__rmul__", {"mul.Tensor"}, true},
    {Binding::kMethod, "__truediv__", {"div.Tensor"}, true},
    {Binding::kMethod, "__matmul__", {"matmul"}},
    {Binding::kMethod, "__neg__", {"neg"}},
    {Binding::kMethod, "detach", {"detach"}},
    {Binding::kMethod, "t", {"t"}},
    {Binding::kMethod, "add", {"add.Tensor"}, true},
    {Binding::kMethod, "sub", {"sub.Tensor"}, true},
    {Binding::kMethod, "mul", {"mul.Tensor"}, true},
    {Binding::kMethod, "div", {"div.Tensor"}, true},
    {Binding::kMethod, "pow", {"pow.Tensor_Scalar"}},
    {Binding::kMethod, "clamp", {"clamp"}},
    {Binding::kMethod, "clamp_min", {"clamp_min"}},
    {Binding::kMethod, "masked_fill", {"masked_fill.Scalar"}},
    {Binding::kMethod, "eq", {"eq.Scalar", "eq.Tensor"}},
    {Binding::kMethod, "ne", {"ne.Scalar", "ne.Tensor"}},
    {Binding::kMethod, "lt", {"lt.Scalar", "lt.Tensor"}},
    {Binding::kMethod, "le", {"le.Scalar", "le.Tensor"}},
    {Binding::kMethod, "gt", {"gt.Scalar", "gt.Tensor"}},
    {Binding::kMethod, "ge", {"ge.Scalar", "ge.Tensor"}},
    {Binding::kMethod, "matmul", {"matmul"}},
    {Binding::kMethod, "mm", {"mm"}},
    {Binding::kMethod, "bmm", {"bmm"}},
    {Binding::kMethod, "chunk", {"chunk"}},
    {Binding::kMethod, "select", {"select.int"}},
    {Binding::kMethod, "narrow", {"narrow"}},
    {Binding::kMethod, "unbind", {"unbind.int"}},
    {Binding::kMethod, "squeeze", {"squeeze", "squeeze.dim"}},
    {Binding::kMethod, "unsqueeze", {"unsqueeze"}},
    {Binding::kMethod, "transpose", {"transpose.int"}},
    {Binding::kMethod, "permute", {"permute"}},
    {Binding::kMethod, "expand", {"expand"}},
    {Binding::kMethod, "expand_as", {"expand_as"}},
    {Binding::kMethod, "view", {"view"}},
    {Binding::kMethod, "view_as", {"view_as"}},
    {Binding::kMethod, "reshape", {"reshape"}},
    {Binding::kMethod, "sum", {"sum", "sum.dim_IntList"}},
    {Binding::kMethod, "mean", {"mean", "mean.dim"}},
    {Binding::kMethod, "softmax", {"softmax.int"}},
    {Binding::kMethod, "log_softmax", {"log_softmax.int"}},
    {Binding::kMethod, "gather", {"gather"}},
    {Binding::kMethod, "index_select", {"index_select"}},
    {Binding::kMethod, "index_add", {"index_add"}},
    {Binding::kMethod, "scatter", {"scatter.src"}},
    {Binding::kMethod, "scatter_add", {"scatter_add"}},
    {Binding::kMethod, "scatter_reduce", {"scatter_reduce.two"}},
    {Binding::kMethod, "new_zeros", {"new_zeros"}},
    {Binding::kMethod, "new_ones", {"new_ones"}},
    {Binding::kMethod, "new_full", {"new_full"}},
    {Binding::kTorch, "add", {"add.Tensor"}, true},
    {Binding::kTorch, "sub", {"sub.Tensor"}, true},
    {Binding::kTorch, "mul", {"mul.Tensor"}, true},
    {Binding::kTorch, "div", {"div.Tensor"}, true},
    {Binding::kTorch, "pow", {"pow.Tensor_Scalar"}},
    {Binding::kTorch, "clamp", {"clamp"}},
    {Binding::kTorch, "where", {"where.self"}},
    {Binding::kTorch, "matmul", {"matmul"}},
    {Binding::kTorch, "mm", {"mm"}},
    {Binding::kTorch, "bmm", {"bmm"}},
    {Binding::kTorch, "addmm", {"addmm"}},
    {Binding::kTorch, "baddbmm", {"baddbmm"}},
    {Binding::kTorch, "cat", {"cat"}},
    {Binding::kTorch, "stack", {"stack"}},
    {Binding::kTorch, "chunk", {"chunk"}},
    {Binding::kTorch, "split", {"split.Tensor"}},
    {Binding::kTorch, "gather", {"gather"}},
    {Binding::kTorch, "index_select", {"index_select"}},
    {Binding::kTorch, "index_add", {"index_add"}},
    {Binding::kTorch, "scatter_add", {"scatter_add"}},
    {Binding::kTorch, "softmax", {"softmax.int"}},
    {Binding::kTorch, "log_softmax", {"log_softmax.int"}},
    {Binding::kTorch, "transpose", {"transpose.int"}},
    {Binding::kTorch, "squeeze", {"squeeze", "squeeze.dim"}},
    {Binding::kTorch, "unsqueeze", {"unsqueeze"}},
    {Binding::kTorch, "unbind", {"unbind.int"}},
    {Binding::kTorch, "sum", {"sum", "sum.dim_IntList"}},
    {Binding::kTorch, "mean", {"mean", "mean.dim"}},
    {Binding::kTorch, "embedding", {"embedding"}},
    {Binding::kTorch, "lstm_cell", {"lstm_cell"}},
    {Binding::kTorch, "gru_cell", {"gru_cell"}},
    {Binding::kTorch, "layer_norm", {"layer_norm"}},
    {Binding::kNN, "linear", {"linear"}},
    {Binding::kNN, "scaled_dot_product_attention", {"scaled_dot_product_attention"}},
    {Binding::kNN, "cross_entropy_loss", {"cross_entropy_loss"}, false, true},
};

}  // namespace autobatch

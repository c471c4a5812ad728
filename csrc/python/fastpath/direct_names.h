// The methods and functions that have a short way to capture (direct_calls.h): those that models
// call most.
#pragma once

#include <array>
#include <cstdint>

namespace autobatch {

enum class Binding : uint8_t { kMethod, kTorch, kNN };

struct DirectName {
  Binding binding;
  const char* name;
  std::array<const char*, 2> ops;  // in the order of the binding's overloads
  bool number = false;             // one may stand to the right of the tensor
  bool whole = false;              // only with all arguments: the binding's defaults are others
};

inline constexpr DirectName kNames[] = {
    {Binding::kMethod, "__add__", {"add.Tensor"}, true},
    {Binding::kMethod, "__radd__", {"add.Tensor"}, true},
    {Binding::kMethod, "__sub__", {"sub.Tensor"}, true},
    {Binding::kMethod, "__mul__", {"mul.Tensor"}, true},
    {Binding::kMethod, "__rmul__", {"mul.Tensor"}, true},
    {Binding::kMethod, "__truediv__", {"div.Tensor"}, true},
    {Binding::kMethod, "__matmul__", {"matmul"}},
    {Binding::kMethod, "__neg__", {"neg"}},
    {Binding::kMethod, "tanh", {"tanh"}},
    {Binding::kMethod, "sigmoid", {"sigmoid"}},
    {Binding::kMethod, "relu", {"relu"}},
    {Binding::kMethod, "exp", {"exp"}},
    {Binding::kMethod, "log", {"log"}},
    {Binding::kMethod, "sqrt", {"sqrt"}},
    {Binding::kMethod, "rsqrt", {"rsqrt"}},
    {Binding::kMethod, "abs", {"abs"}},
    {Binding::kMethod, "square", {"square"}},
    {Binding::kMethod, "sin", {"sin"}},
    {Binding::kMethod, "cos", {"cos"}},
    {Binding::kMethod, "detach", {"detach"}},
    {Binding::kMethod, "t", {"t"}},
    {Binding::kMethod, "add", {"add.Tensor"}, true},
    {Binding::kMethod, "sub", {"sub.Tensor"}, true},
    {Binding::kMethod, "mul", {"mul.Tensor"}, true},
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
    {Binding::kMethod, "view", {"view"}},
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
    {Binding::kTorch, "tanh", {"tanh"}},
    {Binding::kTorch, "sigmoid", {"sigmoid"}},
    {Binding::kTorch, "relu", {"relu"}},
    {Binding::kTorch, "exp", {"exp"}},
    {Binding::kTorch, "log", {"log"}},
    {Binding::kTorch, "sqrt", {"sqrt"}},
    {Binding::kTorch, "rsqrt", {"rsqrt"}},
    {Binding::kTorch, "abs", {"abs"}},
    {Binding::kTorch, "add", {"add.Tensor"}, true},
    {Binding::kTorch, "sub", {"sub.Tensor"}, true},
    {Binding::kTorch, "mul", {"mul.Tensor"}, true},
    {Binding::kTorch, "matmul", {"matmul"}},
    {Binding::kTorch, "mm", {"mm"}},
    {Binding::kTorch, "bmm", {"bmm"}},
    {Binding::kTorch, "addmm", {"addmm"}},
    {Binding::kTorch, "baddbmm", {"baddbmm"}},
    {Binding::kTorch, "cat", {"cat"}},
    {Binding::kTorch, "stack", {"stack"}},
    {Binding::kTorch, "chunk", {"chunk"}},
    {Binding::kTorch, "split", {"split.Tensor"}},
    {Binding::kTorch, "unbind", {"unbind.int"}},
    {Binding::kTorch, "sum", {"sum", "sum.dim_IntList"}},
    {Binding::kTorch, "mean", {"mean", "mean.dim"}},
    {Binding::kTorch, "embedding", {"embedding"}},
    {Binding::kTorch, "lstm_cell", {"lstm_cell"}},
    {Binding::kTorch, "gru_cell", {"gru_cell"}},
    {Binding::kTorch, "layer_norm", {"layer_norm"}},
    {Binding::kNN, "linear", {"linear"}},
    {Binding::kNN, "silu", {"silu"}},
    {Binding::kNN, "leaky_relu", {"leaky_relu"}},
    {Binding::kNN, "scaled_dot_product_attention", {"scaled_dot_product_attention"}},
    {Binding::kNN, "cross_entropy_loss", {"cross_entropy_loss"}, false, true},
};

}  // namespace autobatch

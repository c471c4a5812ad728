// Tensors that interpret the memory of another tensor differently. view_as_complex(),
// view_as_real() and conj() return such tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace autobatch {

// How a tensor interprets the memory of another tensor.
struct Reading {
  c10::ScalarType dtype;   // dtype of the memory, or the corresponding complex or real dtype
  bool conjugate = false;  // the values are the conjugates of the complex numbers in memory
};

// Returns a dense tensor [numel] over the memory of `memory`. The tensor begins `offset` elements
// of `memory` after the start of `memory`. The tensor has no autograd history.
at::Tensor reinterpreted(const at::Tensor& memory, const Reading& reading, int64_t offset,
                         int64_t numel);

// Returns the function with which autograd makes `view` from `base` again. Returns null if autograd
// needs no such function, because both tensors interpret their storage in the same way.
std::unique_ptr<torch::autograd::ViewFunc> make_view_function(const at::Tensor& base,
                                                              const at::Tensor& view);

}  // namespace autobatch

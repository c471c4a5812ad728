// The ops that implement view_as_complex(), view_as_real() and conj() of pending tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace autobatch {

// Kernels of autobatch::as_complex, as_real and conjugate, for calls that are not captured. The
// argument is a dense tensor [n], and the result is a view of it. as_complex converts numbers [2m]
// to complex numbers [m], and as_real converts complex numbers [m] to numbers [2m].
at::Tensor as_complex(const at::Tensor& x);
at::Tensor as_real(const at::Tensor& x);
at::Tensor conjugate(const at::Tensor& x);
// Kernel of autobatch::memory_view. Returns a view of the memory of x that begins at the first
// element.
at::Tensor memory_view(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace autobatch

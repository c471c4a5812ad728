// softmax and log_softmax over segments of numbers, such as the rows of attention weights of
// instances of different lengths.
#pragma once

#include "autobatch/kernels/segment_reduce.h"

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// Whether there is a kernel for the device and dtype of this tensor. There are kernels for CPUs
// with AVX2 or AVX-512, in float and double.
bool has_softmax_kernel(const at::Tensor& like);

// Writes the softmax of each segment of x, or the logarithm of the softmax, to `out`. x and `out`
// are contiguous 1-D tensors with the elements of all segments.
void segment_softmax(const at::Tensor& x, const Counts& counts, bool log, at::Tensor& out);
// Returns the gradient of x, given y (the result of segment_softmax) and g (the gradient of y).
at::Tensor segment_softmax_gradient(const at::Tensor& g, const at::Tensor& y, const Counts& counts,
                                    bool log);

// Some consecutive segments of a call. In backward, `gradient` is the gradient of the result, and
// `x` is the result itself.
struct SoftmaxSegments {
  const void* gradient = nullptr;
  const void* x = nullptr;
  void* out = nullptr;
  c10::ArrayRef<int64_t> counts;
  bool log = false;
};
// Runs the segments on one thread (cpu_dispatch.h).
using SoftmaxKernel = void (*)(const SoftmaxSegments&, c10::ScalarType);

}  // namespace autobatch

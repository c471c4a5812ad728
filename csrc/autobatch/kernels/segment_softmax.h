// softmax and log_softmax over segments of numbers, such as the rows of attention weights of
// instances of different lengths.
#pragma once

#include "autobatch/kernels/segment_reduce.h"

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// Whether there is a kernel for a tensor like this one: on CPUs with AVX2 or AVX-512, in float and
// double.
bool has_softmax_kernel(const at::Tensor& like);

// out = softmax of x, or its logarithm. x and out: contiguous, [sum of counts].
void segment_softmax(const at::Tensor& x, const Counts& counts, bool log, at::Tensor& out);
// Returns the gradient of x, from the gradient g of the result y.
at::Tensor segment_softmax_gradient(const at::Tensor& g, const at::Tensor& y, const Counts& counts,
                                    bool log);

// Some consecutive segments. In backward `gradient` is the result's gradient and `x` the result.
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

// The kernel of softmax over segments, for one CPU capability. Only kernels_avx2.cpp and
// kernels_avx512.cpp include this file. Each of these files is compiled for one capability, with
// ATen's macros for this capability.
#pragma once

#include "autobatch/kernels/segment_softmax.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>

namespace autobatch {
namespace {

template <class T>
class SoftmaxRun {
 public:
  using V = at::vec::Vectorized<T>;

  // The formulas are those of ATen's kernels (aten/src/ATen/native/cpu/SoftMaxKernel.cpp).
  static void forward(const T* x, T* y, int64_t n, bool log) {
    const T largest =
        at::vec::reduce_all<T>([](const V& a, const V& b) { return at::vec::maximum(a, b); }, x, n);
    const V shift(largest);
    if (log) {
      const T total =
          at::vec::map_reduce_all<T>([&](const V& a) { return (a - shift).exp(); }, plus, x, n);
      const V logarithm(std::log(total));
      return at::vec::map<T>([&](const V& a) { return a - shift - logarithm; }, y, x, n);
    }
    at::vec::map<T>([&](const V& a) { return (a - shift).exp(); }, y, x, n);
    const V total(at::vec::reduce_all<T>(plus, y, n));
    at::vec::map<T>([&](const V& a) { return a / total; }, y, y, n);
  }

  static void backward(const T* g, const T* y, T* out, int64_t n, bool log) {
    if (log) {
      const V total(at::vec::reduce_all<T>(plus, g, n));
      return at::vec::map2<T>([&](const V& a, const V& b) { return a - b.exp() * total; }, out, g,
                              y, n);
    }
    const V total(
        at::vec::map2_reduce_all<T>([](const V& a, const V& b) { return a * b; }, plus, g, y, n));
    at::vec::map2<T>([&](const V& a, const V& b) { return (a - total) * b; }, out, g, y, n);
  }

 private:
  static V plus(const V& a, const V& b) { return a + b; }
};

template <class T>
void run_softmax_segments(const SoftmaxSegments& s) {
  int64_t start = 0;
  for (const int64_t n : s.counts) {
    const T* x = static_cast<const T*>(s.x) + start;
    T* out = static_cast<T*>(s.out) + start;
    start += n;
    if (n == 0) continue;
    s.gradient == nullptr ? SoftmaxRun<T>::forward(x, out, n, s.log)
                          : SoftmaxRun<T>::backward(static_cast<const T*>(s.gradient) +
                                                        (x - static_cast<const T*>(s.x)),
                                                    x, out, n, s.log);
  }
}

void run_softmax(const SoftmaxSegments& segments, c10::ScalarType dtype) {
  dtype == c10::ScalarType::Double ? run_softmax_segments<double>(segments)
                                   : run_softmax_segments<float>(segments);
}

}  // namespace
}  // namespace autobatch

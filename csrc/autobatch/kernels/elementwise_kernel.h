// The kernel of elementwise programs for one CPU capability. Only kernels_avx2.cpp and
// kernels_avx512.cpp include this file. Each of these files is compiled for one capability, with
// ATen's macros for this capability.
#pragma once

#include "autobatch/kernels/elementwise_program.h"

#include <ATen/cpu/vec/vec.h>

#include <algorithm>

namespace autobatch {
namespace {

// --- the functions of elementwise_ops.inc for one vector (as in aten/src/ATen/native/cpu) ---

#define AUTOBATCH_MEMBER(name) \
  template <class V>           \
  V name(const V& a) {         \
    return a.name();           \
  }
AUTOBATCH_MEMBER(abs)
AUTOBATCH_MEMBER(cos)
AUTOBATCH_MEMBER(erf)
AUTOBATCH_MEMBER(exp)
AUTOBATCH_MEMBER(expm1)
AUTOBATCH_MEMBER(log)
AUTOBATCH_MEMBER(log1p)
AUTOBATCH_MEMBER(sin)
AUTOBATCH_MEMBER(sqrt)
AUTOBATCH_MEMBER(tanh)
#undef AUTOBATCH_MEMBER
template <class V>
V relu(const V& a) {
  return at::vec::clamp_min(a, V(0));
}
template <class V>
V sigmoid(const V& a) {
  return (V(1) + (V(0) - a).exp()).reciprocal();
}
// Returns `a` where the mask is set, and `b` elsewhere.
template <class V>
V select(const V& mask, const V& a, const V& b) {
  return V::blendv(b, a, mask);
}

// Computes tanh with an error of at most two units in the last place. Takes less than half the time
// of Sleef's tanh. The polynomial is from Moshier's Cephes library.
inline at::vec::Vectorized<float> tanh(const at::vec::Vectorized<float>& a) {
  using V = at::vec::Vectorized<float>;
  using at::vec::fmadd;
  const V z = a * a, size = a.abs();
  V p = fmadd(z, V(-5.70498872745e-3F), V(2.06390887954e-2F));
  p = fmadd(p, z, V(-5.37397155531e-2F));
  p = fmadd(p, z, V(1.33314422036e-1F));
  p = fmadd(p, z, V(-3.33332819422e-1F));
  const V near = fmadd(p * z, size, size);
  const V far = V(1) - V(2) / ((size + size).exp() + V(1));
  return V::blendv(far, near, size < V(0.625F)) | (a & V(-0.0F));
}

template <class T>
class ElementwiseRun {
 public:
  using V = at::vec::Vectorized<T>;

  ElementwiseRun(const ElementwiseProgram& program, int64_t block, void* scratch)
      : program_(program), block_(block), scratch_(static_cast<T*>(scratch)) {}

  void run(int64_t first, int64_t rows) {
    for (const ElementwiseStep& step : program_.steps) run_step(step, first, rows);
  }

 private:
  void run_step(const ElementwiseStep& step, int64_t first, int64_t rows) {
    const T number = static_cast<T>(step.op.number);
    const V n(number), scale(static_cast<T>(step.op.scale));
    const auto unary = [&](auto f) { loop<false>(step, first, rows, f); };
    const auto binary = [&](auto f) { loop<true>(step, first, rows, f); };
    switch (step.op.code) {
      case ElementwiseCode::kCopy:
        return unary([&](const V& a, const V&) { return a; });
      case ElementwiseCode::kNeg:
        return unary([&](const V& a, const V&) { return a.neg(); });
      case ElementwiseCode::kAddNumber:
        return unary([&](const V& a, const V&) { return at::vec::fmadd(a, scale, n); });
      case ElementwiseCode::kMulNumber:
        return unary([&](const V& a, const V&) { return a * n; });
      case ElementwiseCode::kDivNumber:
        return unary([&](const V& a, const V&) { return a / n; });
      case ElementwiseCode::kAdd:
        return binary([&](const V& a, const V& b) { return at::vec::fmadd(b, scale, a); });
      case ElementwiseCode::kMul:
        return binary([&](const V& a, const V& b) { return a * b; });
      case ElementwiseCode::kDiv:
        return binary([&](const V& a, const V& b) { return a / b; });
#define FUSED_ELEMENTWISE_OP(Name, op, reads, formula, gradient, ...) \
  case ElementwiseCode::k##Name:                                      \
    return unary([](const V& x, const V&) -> V { return formula; });  \
  case ElementwiseCode::k##Name##Backward:                            \
    return binary([](const V& g, const V& value) -> V {               \
      [[maybe_unused]] const V &x = value, &y = value;                \
      return gradient;                                                \
    });
#include "autobatch/kernels/elementwise_ops.inc"
    }
  }

  struct Bound {
    T* data;
    int64_t row, mid;
    int64_t next;  // elements from a place in this block to the same place in the next block
  };

  Bound bind(const ElementwisePlace& place, int64_t first) const {
    if (place.data == nullptr)
      return {scratch_ + place.before * block_ + place.offset, place.row, place.mid, 0};
    return {static_cast<T*>(place.data) + first * place.row, place.row, place.mid,
            block_ * place.row};
  }

  template <bool kTwo, class F>
  void loop(const ElementwiseStep& step, int64_t first, int64_t rows, const F& f) const {
    const Bound out = bind(step.out, first), a = bind(step.a, first);
    const Bound b = kTwo ? bind(step.b, first) : a;
    int64_t mid = step.mid, inner = step.inner;
    const auto all = [&](auto holds) { return holds(out) && holds(a) && holds(b); };
    if (all([&](const Bound& x) { return x.mid == inner; })) inner *= mid, mid = 1;
    if (mid == 1 && all([&](const Bound& x) { return x.row == inner; })) inner *= rows, rows = 1;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t m = 0; m < mid; ++m) {
        const auto at = [&](const Bound& x) {
          return Bound{x.data + r * x.row + m * x.mid, x.row, x.mid, x.next};
        };
        run_inner<kTwo>(at(out), at(a), at(b), inner, f);
      }
    }
  }

  // Applies f to n elements of `a` and, if kTwo is true, of `b`. `out` may be `a` or `b`.
  // Prefetches the elements of the next block. In backward most of these elements are no longer in
  // the cache, and the hardware does not predict the next address if rows are read in parts.
  template <bool kTwo, class F>
  static void run_inner(const Bound& out, const Bound& a, const Bound& b, int64_t n, const F& f) {
    constexpr int64_t kLanes = V::size();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      __builtin_prefetch(a.data + i + a.next);
      if (kTwo) __builtin_prefetch(b.data + i + b.next);
      __builtin_prefetch(out.data + i + out.next, 1);
      const V x = V::loadu(a.data + i);
      f(x, kTwo ? V::loadu(b.data + i) : x).store(out.data + i);
    }
    if (i == n) return;
    const V x = V::loadu(a.data + i, n - i);
    f(x, kTwo ? V::loadu(b.data + i, n - i) : x).store(out.data + i, static_cast<int>(n - i));
  }

  const ElementwiseProgram& program_;
  int64_t block_;
  T* scratch_;
};

template <class T>
void run_blocks(const ElementwiseProgram& program, int64_t first, int64_t last, int64_t block,
                void* scratch) {
  ElementwiseRun<T> run(program, block, scratch);
  for (; first < last; first += block) run.run(first, std::min(block, last - first));
}

void run_rows(const ElementwiseProgram& program, int64_t first, int64_t last, int64_t block,
              void* scratch) {
  if (program.dtype == c10::ScalarType::Double) {
    return run_blocks<double>(program, first, last, block, scratch);
  }
  run_blocks<float>(program, first, last, block, scratch);
}

}  // namespace
}  // namespace autobatch

// The ops of elementwise passes (fused_elementwise.h). No torch header in here, so that CUDA's
// kernel reads the same list.
#pragma once

#include <cstdint>

namespace autobatch {

// What a step computes for each element, of `a` and `b`.
enum class Pointwise : uint8_t {
  kCopy,
  kNeg,
  kExp,
  kTanh,
  kSigmoid,
  kRelu,
  kAddNumber,  // number + scale * a
  kMulNumber,  // number * a
  kAdd,        // a + scale * b
  kMul,
  kTanhBackward,  // from here on: the gradient of x, from that of the result, a, and the result, b
  kSigmoidBackward,
  kReluBackward,
};

// An op as a step.
struct PointwiseOp {
  Pointwise code;
  double number = 0;
  double scale = 1;
};

}  // namespace autobatch

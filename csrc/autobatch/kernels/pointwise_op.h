// The ops of elementwise passes (fused_elementwise.h). This file includes no torch header, so that
// the CUDA kernel can include it.
#pragma once

#include <cstdint>

namespace autobatch {

// What a step computes for each element, from `a` and `b`.
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
  kTanhBackward,  // from here on: the gradient of x; a: gradient of the result, b: the result
  kSigmoidBackward,
  kReluBackward,
};

// An op with its constants.
struct PointwiseOp {
  Pointwise code;
  double number = 0;
  double scale = 1;
};

}  // namespace autobatch

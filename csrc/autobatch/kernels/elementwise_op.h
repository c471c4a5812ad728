// The ops of elementwise programs (elementwise_program.h). This file includes no torch header, so
// that the source file of the CUDA kernel can include it.
#pragma once

#include "autobatch/kernels/cuda/device_code.h"

#include <cstdint>

namespace autobatch {

// The operation of a step. It computes each element of the result from an element of `a` and, for
// some ops, an element of `b`.
enum class ElementwiseCode : uint8_t {
  kCopy,
  kNeg,
  kAddNumber,  // number + scale * a
  kMulNumber,  // number * a
  kDivNumber,  // a / number
#define FUSED_ELEMENTWISE_OP(Name, ...) k##Name,
#include "autobatch/kernels/elementwise_ops.inc"
  kAdd,  // the first op that reads `b`: a + scale * b
  kMul,
  kDiv,  // a / b
// The gradient of the operand of a fused op, where `a` is the gradient of the result, and `b` is
// the operand or the result.
#define FUSED_ELEMENTWISE_OP(Name, ...) k##Name##Backward,
#include "autobatch/kernels/elementwise_ops.inc"
};

AUTOBATCH_DEVICE constexpr bool is_binary(ElementwiseCode code) {
  return code >= ElementwiseCode::kAdd;
}

// An op with its constants.
struct ElementwiseOp {
  ElementwiseCode code;
  double number = 0;
  double scale = 1;
};

}  // namespace autobatch

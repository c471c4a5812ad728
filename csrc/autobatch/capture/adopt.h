// Turns ordinary tensors into pending ones. `y += h` with a pending `h` and an ordinary `y` would
// need the value of `h` at once. If the caller's object holds the only reference to `y`, the object
// is given a captured copy of `y` instead, so that the write can be captured.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class PendingTensor;

// Returns a captured copy of `tensor` that may replace it. The copy has the same metadata and
// version. Returns an undefined tensor if no ops are captured, or if anything but the caller's
// object and the graph refers to the tensor or its storage. Also returns an undefined tensor unless
// `tensor` is a plain dense tensor with untouched autograd metadata in memory that PyTorch owns.
AUTOBATCH_INTERNAL at::Tensor pending_copy(const at::Tensor& tensor);

// While an instance exists, the copy may be exchanged for the tensor with
// `torch._C._swap_tensor_impl`. PyTorch refuses to swap a tensor that has weak references, so the
// graph's weak reference to the copy is released meanwhile.
class AUTOBATCH_INTERNAL TensorSwap {
 public:
  explicit TensorSwap(const at::Tensor& copy);
  ~TensorSwap();
  TensorSwap(const TensorSwap&) = delete;
  TensorSwap& operator=(const TensorSwap&) = delete;

 private:
  PendingTensor& copy_;
};

}  // namespace autobatch

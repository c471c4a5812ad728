// Turns ordinary tensors into pending tensors. If `h` is pending and `y` is an ordinary tensor, the
// write `y += h` would need the value of `h` immediately. If only the caller's object refers to
// `y`, the tensor in this object is replaced by a captured copy of `y`. Then the write can be
// captured.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class PendingTensor;

// Returns a captured copy of `tensor` that may replace `tensor`. The copy has the same metadata and
// version. Returns an undefined tensor if no ops are captured, or if there is any reference to
// `tensor` or its storage besides the caller's object and the graph. Only a plain dense tensor with
// unchanged autograd metadata, in memory that PyTorch owns, can be copied. For any other tensor,
// pending_copy() also returns an undefined tensor.
AUTOBATCH_INTERNAL at::Tensor pending_copy(const at::Tensor& tensor);

// While an instance of this class exists, the caller may exchange the copy and the tensor with
// `torch._C._swap_tensor_impl`. PyTorch refuses to swap a tensor that has weak references.
// Therefore the graph gives up its weak reference to the copy while the instance exists.
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

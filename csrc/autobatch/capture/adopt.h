// Ordinary tensors that become pending: `y += h` of a pending `h` to a `y` that no captured op made
// would need the value of `h` now. Where nobody but the caller's one object refers to `y`, that
// object is given a captured copy in its place.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class PendingTensor;

// A pending copy of `tensor` that may stand in its place: of the same metadata and version.
// Undefined if there is none: more than one object, or somebody's memory, depends on it being what
// it is; or no ops are captured.
AUTOBATCH_INTERNAL at::Tensor pending_copy(const at::Tensor& tensor);

// While it lives, the copy may be exchanged for the tensor (`torch._C._swap_tensor_impl`), which
// PyTorch does to nothing that weak references exist of: the graph's is let go.
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

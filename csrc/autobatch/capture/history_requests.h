// Requests to autograd about a pending tensor, such as `register_hook` and `retain_grad`. They wait
// until the tensor is real, so they cause no flush.
#pragma once

#include "autobatch/graph/pending_tensor.h"

namespace autobatch {

// Makes the request wait, and keeps the tensor alive until then. Returns false if the request must
// be made now: the tensor is not pending, is not the only result of an op with a history, or is a
// view; the block has captured writes; or the call is traced.
AUTOBATCH_INTERNAL bool defer_request(const at::TensorBase& tensor, PendingTensor::Request request);

// Whether requests wait that a write to the memory of `base` must not precede. A hook of a written
// tensor lacks the gradient of pieces that were read (docs/limits.md), so the first write after a
// request is not captured.
bool await_requests(const Graph& graph, ValueId base);

}  // namespace autobatch

// Requests to autograd about a pending tensor, such as `register_hook` and `retain_grad`. A request
// waits until the tensor is real, so the request causes no flush.
#pragma once

#include "autobatch/graph/pending_tensor.h"

namespace autobatch {

// Stores the request in the tensor, and keeps the tensor alive until the flush that makes it real.
// This flush calls the request. Returns false if the caller has to flush instead. This is the case
// if the tensor is not pending, has no autograd history, or is a view or one of several results of
// an op. It is also the case if the block has captured writes, or if the call is traced.
AUTOBATCH_INTERNAL bool defer_request(const at::TensorBase& tensor, PendingTensor::Request request);

// Whether a flush must run before a write to the memory of `base`. A flush is needed if a request
// waits, because a hook of a tensor does not get the gradient of written pieces (docs/limits.md).
bool must_flush_before_write(const Graph& graph, ValueId base);

}  // namespace autobatch

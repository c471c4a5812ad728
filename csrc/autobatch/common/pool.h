// Memory for the buffers of flushes and of their backward, kept from one to the next.
//
// A training step allocates the same tens of megabytes again and again. Given back to the system in
// between, each page comes back through a page fault that also clears it: a fifth to a quarter of
// the time of flush and backward of a Tree-LSTM with hidden size 128.
#pragma once

#include "autobatch/common/pooled_memory.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace autobatch {

// An uninitialized tensor of `numel` elements. On a CPU its memory, where that is large enough to
// matter, comes from the pool and goes back to it; otherwise as at::empty gives it.
at::Tensor pooled_empty(int64_t numel, const at::TensorOptions& options);
at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor pooled_zeros(int64_t numel, const at::TensorOptions& options);

// Whether the tensor's memory is the pool's.
bool is_pooled(const at::Tensor& tensor);

// At the end of a flush: what no flush of late has needed goes back to the system.
void trim_pool();

// Bytes that wait in the pool for the next flush.
size_t pooled_bytes();

// Gives all of them back to the system, and says how many they were.
size_t empty_pool();

}  // namespace autobatch

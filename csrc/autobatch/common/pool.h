// A memory pool for the buffers of flushes and of their backward, kept from one flush to the next.
//
// Each training step allocates the same tens of megabytes. If this memory went back to the system
// between two steps, each page would cost a page fault in the next step, which also clears the
// page. Without the pool these page faults took a fifth to a quarter of the time of flush and
// backward of a Tree-LSTM with hidden size 128.
#pragma once

#include "autobatch/common/pooled_memory.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace autobatch {

// Returns an uninitialized tensor of `numel` elements. If the tensor is on a CPU and large enough,
// its memory comes from the pool and returns to the pool. Otherwise the function is like at::empty.
at::Tensor pooled_empty(int64_t numel, const at::TensorOptions& options);
at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor pooled_zeros(int64_t numel, const at::TensorOptions& options);

// Whether the tensor's memory belongs to the pool.
bool is_pooled(const at::Tensor& tensor);

// Call this function at the end of a flush. It returns to the system all memory that no recent
// flush has needed.
void trim_pool();

// Returns the number of free bytes in the pool.
size_t pooled_bytes();

// Gives all free memory of the pool back to the system. Returns the number of bytes.
size_t empty_pool();

}  // namespace autobatch

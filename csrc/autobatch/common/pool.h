// A memory pool for the buffers of flushes and of their backward, kept from one flush to the next.
//
// Each training step allocates the same tens of megabytes. If these went back to the system in
// between, each page would come back through a page fault that also clears it. That took a fifth to
// a quarter of the time of flush and backward of a Tree-LSTM with hidden size 128.
#pragma once

#include "autobatch/common/pooled_memory.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace autobatch {

// Returns an uninitialized tensor of `numel` elements. On a CPU its memory comes from the pool and
// returns to it, if it is large enough to matter. Otherwise like at::empty.
at::Tensor pooled_empty(int64_t numel, const at::TensorOptions& options);
at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor pooled_zeros(int64_t numel, const at::TensorOptions& options);

// Whether the tensor's memory belongs to the pool.
bool is_pooled(const at::Tensor& tensor);

// To be called at the end of a flush. Gives memory that no recent flush has needed back to the
// system.
void trim_pool();

// Returns the number of free bytes in the pool.
size_t pooled_bytes();

// Gives all free memory of the pool back to the system. Returns the number of bytes.
size_t empty_pool();

}  // namespace autobatch

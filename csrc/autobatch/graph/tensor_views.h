// Tensors over existing memory, made without the dispatcher.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

namespace autobatch {

// Returns a tensor that shares the memory of `tensor`, and has no autograd history and a new
// version counter. Unlike `x.data` in user code, detached_alias() does not call note_alias
// (storage_aliases.h), so other tensors do not notice a write through the returned tensor.
at::Tensor detached_alias(const at::Tensor& tensor);

// Returns a view of the buffer with `sizes` and `strides` (in elements). The view begins `offset`
// elements after the start of the buffer. strided_view() does the same as `as_strided`, but without
// the dispatcher. It must be fast, because a batch makes several views of each operand.
at::Tensor strided_view(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                        int64_t offset);
// dense_view() and rows_view() return a contiguous view that begins `offset` elements after the
// start of the buffer. The view of rows_view() contains `numel` elements as rows of `width`
// elements.
at::Tensor dense_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset);
at::Tensor rows_view(const at::Tensor& buffer, int64_t numel, int64_t width, int64_t offset);

// Returns the sizes [n, *each] of `n` stacked tensors.
at::DimVector stacked_sizes(int64_t n, at::IntArrayRef each);

}  // namespace autobatch

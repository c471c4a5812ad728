// Tensors over existing memory, made without the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

namespace autobatch {

// Returns a tensor over the same memory, without history and with its own version counter. Unlike
// `x.data` in user code, this call notes no alias (storage_aliases.h), so other tensors do not
// notice a write through the returned tensor.
at::Tensor detached_alias(const at::Tensor& tensor);

// Returns a view of the buffer with `sizes` and `strides` (in elements), `offset` elements after
// the start of the buffer. Does the same as `as_strided`, but without the dispatcher, which saves
// time because a batch makes several views of each operand.
at::Tensor strided_view(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                        int64_t offset);
// Contiguous views `offset` elements after the start of the buffer: one with `sizes`, and one of
// `numel` elements as rows of `width`.
at::Tensor dense_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset);
at::Tensor rows_view(const at::Tensor& buffer, int64_t numel, int64_t width, int64_t offset);

}  // namespace autobatch

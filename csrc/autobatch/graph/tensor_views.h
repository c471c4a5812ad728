// Tensors over memory that others have, made without the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

namespace autobatch {

// A tensor over the same memory that has no history and a version counter of its own, through which
// nobody writes: `x.data` of a user's notes an alias (storage_aliases.h), and this does not.
at::Tensor detached_alias(const at::Tensor& tensor);

// `sizes` and `strides` (in elements) over a buffer's memory, `offset` elements behind where the
// buffer starts. As `as_strided`, but not by way of the dispatcher: a batch makes some of each
// operand.
at::Tensor strided_view(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                        int64_t offset);
// [*sizes] one after the other, and `numel` elements as rows of `width`.
at::Tensor dense_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset);
at::Tensor rows_view(const at::Tensor& buffer, int64_t numel, int64_t width, int64_t offset);

}  // namespace autobatch

// Kernels over the rows of instances of different lengths, which lie one after the other: segment s
// is the next counts[s] rows. CPU: our own; other devices: ATen calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace autobatch {

using Counts = std::vector<int64_t>;

// out[s] = the sum of the segment's rows; rows [R, inner], out [segments, inner] of the rows' type,
// or, where that is bool or integral, int64. As precise as eager's: pairwise, halves in float.
void segment_sum(const at::Tensor& rows, const Counts& counts, at::Tensor& out);
// The same of what is looked up in `matrix` [V, D]. A segment is counts[s] terms of `rows` indices
// each, and out[s * rows + r] the sum over its terms of the row at their r-th index.
void segment_sum_of(const at::Tensor& matrix, const at::Tensor& indices, const Counts& counts,
                    int64_t rows, at::Tensor& out);
// Row s of `rows` counts[s] times: [sum of counts, inner].
at::Tensor repeat_rows(const at::Tensor& rows, const Counts& counts);

// values[s] = the largest (or smallest) of the segment's rows, element by element; NaN if there is
// one. indices[s] (int64): the first row that has it. Of no rows: the least (or greatest)
// finite number, and 0.
void segment_extreme(const at::Tensor& rows, const Counts& counts, bool largest, at::Tensor& values,
                     at::Tensor& indices);
// rows[start of s + indices[s]] = values[s], zeros elsewhere: [R, inner].
at::Tensor scatter_to_rows(const at::Tensor& values, const at::Tensor& indices,
                           const Counts& counts);

// out[r] = the sum of the segment's rows up to r; from r on if `reverse`.
void segment_cumsum(const at::Tensor& rows, const Counts& counts, bool reverse, at::Tensor& out);

// out[s] = the product of the segment's rows.
void segment_prod(const at::Tensor& rows, const Counts& counts, at::Tensor& out);
// The derivative of segment_prod, as autograd has it: the product divided by the row where none of
// the instance's elements is zero, else the product of the segment's other rows; 0, if the whole
// instance is one product, where several are. `segments`: how many each instance has.
at::Tensor product_gradient(const at::Tensor& rows, const Counts& counts, const Counts& segments,
                            bool whole);

// Row r of the result: the row of `rows` that stands in its segment's place counted from the end.
at::Tensor reversed_rows(const at::Tensor& rows, const Counts& counts);

}  // namespace autobatch

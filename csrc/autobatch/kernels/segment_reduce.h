// Kernels over the rows of instances of different lengths. The instances' rows are stored one after
// the other. Segment s is the next counts[s] rows. CPU: our own kernels; other devices: ATen calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace autobatch {

using Counts = std::vector<int64_t>;

// out[s] = the sum of the rows of segment s. `rows` is [R, inner]. `out` is [segments, inner], of
// the dtype of `rows`, or of int64 if that dtype is bool or integral. The sum is as precise as
// eager's: summation is pairwise, and half types are summed in float.
void segment_sum(const at::Tensor& rows, const Counts& counts, at::Tensor& out);
// Like segment_sum, but for rows that are looked up in `matrix` [V, D]. A segment is counts[s]
// terms of `rows` indices each. out[s * rows + r] is the sum, over the segment's terms, of the
// matrix row at the term's r-th index.
void segment_sum_of(const at::Tensor& matrix, const at::Tensor& indices, const Counts& counts,
                    int64_t rows, at::Tensor& out);
// Returns [sum of counts, inner]: row s of `rows` repeated counts[s] times.
at::Tensor repeat_rows(const at::Tensor& rows, const Counts& counts);

// values[s] = the largest (or smallest) of the segment's rows, element by element; NaN if the
// segment has a NaN. indices[s] (int64): the first row of the segment with that value. For a
// segment without rows (CPU only) the value is the lowest (or greatest) finite number, and the
// index is 0.
void segment_extreme(const at::Tensor& rows, const Counts& counts, bool largest, at::Tensor& values,
                     at::Tensor& indices);
// Returns [R, inner] with rows[start of s + indices[s]] = values[s], and zeros elsewhere.
at::Tensor scatter_to_rows(const at::Tensor& values, const at::Tensor& indices,
                           const Counts& counts);

// out[r] = the sum of the segment's rows up to row r; with `reverse`, from row r on.
void segment_cumsum(const at::Tensor& rows, const Counts& counts, bool reverse, at::Tensor& out);

// out[s] = the product of the segment's rows.
void segment_prod(const at::Tensor& rows, const Counts& counts, at::Tensor& out);
// Returns the derivative of segment_prod, computed as autograd does. If the instance has no zero
// element, the derivative is the product divided by the row, else the product of the segment's
// other rows. If the instance has several zeros and `whole` (the whole instance is one product),
// the derivative is 0. `segments`: number of segments of each instance.
at::Tensor product_gradient(const at::Tensor& rows, const Counts& counts, const Counts& segments,
                            bool whole);

// Returns the rows with their order reversed within each segment.
at::Tensor reversed_rows(const at::Tensor& rows, const Counts& counts);

}  // namespace autobatch

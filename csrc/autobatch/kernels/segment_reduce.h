// Kernels over the rows of instances of different lengths. The instances' rows are stored one after
// the other. Segment s consists of the counts[s] rows after segment s - 1. CPUs use kernels of this
// library, and other devices use ATen calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace autobatch {

using Counts = std::vector<int64_t>;

// Computes out[s], the sum of the rows of segment s. `rows` is [R, inner]. `out` is [segments,
// inner]. The dtype of `out` is the dtype of `rows`, or int64 if `rows` is bool or integral. The
// sum is as precise as in eager mode: summation is pairwise, and half types are summed in float.
void segment_sum(const at::Tensor& rows, const Counts& counts, at::Tensor& out);
// Like segment_sum, but for rows that are looked up in `matrix` [V, D]. Segment s has counts[s]
// terms, and each term has `rows` indices. out[s * rows + r] is a sum over the terms of segment s.
// Each term contributes the matrix row at its r-th index.
void segment_sum_of(const at::Tensor& matrix, const at::Tensor& indices, const Counts& counts,
                    int64_t rows, at::Tensor& out);
// Repeats row s of `rows` counts[s] times. Returns [total of counts, inner].
at::Tensor repeat_rows(const at::Tensor& rows, const Counts& counts);

// Computes values[s], the largest (or smallest) element of each column of segment s, or NaN if the
// column has a NaN, and indices[s] (int64), the index within the segment of the first row with this
// element. For a segment without rows (CPU only) the value is the lowest (or greatest) finite
// number, and the index is 0.
void segment_extreme(const at::Tensor& rows, const Counts& counts, bool largest, at::Tensor& values,
                     at::Tensor& indices);
// Returns [R, inner] with rows[start of s + indices[s]] = values[s], and zeros elsewhere.
at::Tensor scatter_to_rows(const at::Tensor& values, const at::Tensor& indices,
                           const Counts& counts);

// Computes out[r], the sum of the rows from the start of the segment to row r or, with `reverse`,
// from row r to the end of the segment.
void segment_cumsum(const at::Tensor& rows, const Counts& counts, bool reverse, at::Tensor& out);

// Computes out[s], the product of the rows of segment s.
void segment_prod(const at::Tensor& rows, const Counts& counts, at::Tensor& out);
// Returns the derivative of segment_prod, by autograd's formulas. If an instance contains no zero,
// the derivative with respect to a row is the product divided by the row. Otherwise the derivative
// with respect to a row is the product of the segment's other rows. `whole`: whether each instance
// is one product. If so, the derivative is 0 for an instance with several zeros. `segments`: number
// of segments of each instance.
at::Tensor product_gradient(const at::Tensor& rows, const Counts& counts, const Counts& segments,
                            bool whole);

// Returns the rows with their order reversed within each segment.
at::Tensor reversed_rows(const at::Tensor& rows, const Counts& counts);

}  // namespace autobatch

// The rows that a reduction over a range of dimensions reads (segment_ops.cpp).
#pragma once

#include "autobatch/rules/batch.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace autobatch {

// The range of dimensions that a call reduces or scans. The dimensions before the range are the
// outer dimensions, and the dimensions after the range are the inner dimensions.
struct Range {
  int64_t first = 0, last = 0;  // the dimensions [first, last)

  int64_t outer(const Geometry& g) const { return product(g, 0, first); }
  int64_t length(const Geometry& g) const { return product(g, first, last); }
  int64_t inner(const Geometry& g) const { return product(g, last, g.dim()); }

 private:
  static int64_t product(const Geometry& g, int64_t from, int64_t to) {
    int64_t out = 1;
    for (int64_t d = from; d < to; ++d) out *= g.sizes[d];
    return out;
  }
};

// Instances with several inner dimensions may differ in all inner sizes except the last one. The
// rows of such instances are gathered in another order of dimensions: outer dimensions, inner
// dimensions except the last one, range, last dimension. In this order a segment consists of
// consecutive rows, and a row has the size of the last dimension.

// Returns the rows of operand 0 of all members in the order of segments (see above). The shape is
// [rows, last size].
at::Tensor rows_by_segment(const BatchView& batch, const Range& range);
// Returns the rows of a tensor that has the shape and order of rows_by_segment() in the order of
// the operands' dimensions.
at::Tensor rows_by_operand(const BatchView& batch, const Range& range, const at::Tensor& rows);

}  // namespace autobatch

// The rows that a reduction over a range of dimensions reads (segment_ops.cpp).
#pragma once

#include "autobatch/rules/batch.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace autobatch {

// The range of dimensions that a call reduces or scans. The dimensions in front of the range are
// the outer ones, and the dimensions behind the range are the inner ones.
struct Range {
  int64_t first = 0, last = 0;  // first to last - 1

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

// Instances with several inner dimensions may differ in all inner sizes but the last one. Their
// rows are then gathered in another order: outer, inner without the last, range, last. In this
// order a segment consists of consecutive rows, as wide as the last dimension.

// Returns the rows of operand 0 of all members in this order. Shape: [rows, last size].
at::Tensor rows_by_segment(const BatchView& batch, const Range& range);
// Returns the rows of a tensor that has the shape and order of rows_by_segment() in the order of
// the operands' dimensions.
at::Tensor rows_by_operand(const BatchView& batch, const Range& range, const at::Tensor& rows);

}  // namespace autobatch

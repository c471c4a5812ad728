// Moving rows: one call copies, or adds, the regions of many values, whatever buffers they lie in.
// CPU: our own kernels over (pointer, geometry) lists. Other devices: ATen calls.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/graph/tensor_views.h"
#include "autobatch/kernels/segment_reduce.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace autobatch {

// A strided region of a buffer. `buffer` is a 1-D tensor (a slab) or a graph input's data,
// and `offset` counts elements from its data pointer.
struct Region {
  const at::Tensor* buffer = nullptr;
  int64_t offset = 0;
  const Geometry* geometry = nullptr;
  // Uninitialized memory: what is added first is written there. On a CPU, contiguous.
  bool fresh = false;
};

using Regions = std::vector<Region>;

// How the regions of a batch's members lie in memory.
struct Layout {
  bool uniform = true;  // all of one geometry
  bool same_buffer = true;
  bool same = true;         // all are the same region
  bool regular = true;      // one buffer, one geometry, offsets offset[0] + m * step
  bool consecutive = true;  // one buffer, contiguous, each starting where the one before ends
  int64_t step = 0;         // elements, where regular
  int64_t numel = 0;        // of all regions together
};
Layout layout_of(const Regions& regions);

// The regions of a batch's members, and how they lie. Where they are known to be evenly spaced only
// the first is listed.
class RegionRows {
 public:
  RegionRows() = default;
  explicit RegionRows(Regions regions)
      : layout_(layout_of(regions)),
        regions_(std::move(regions)),
        count_(static_cast<int64_t>(regions_.size())) {}
  // `count` regions from `first` on, `step` elements from one to the next.
  RegionRows(const Region& first, int64_t count, int64_t step);

  const Layout& layout() const { return layout_; }
  const Region& first() const { return regions_.front(); }
  int64_t count() const { return count_; }
  const Regions& all() const;
  // All, or the first where they are known to be evenly spaced.
  const Regions& listed() const { return regions_; }

 private:
  Layout layout_;
  mutable Regions regions_;  // all, or the first
  int64_t count_ = 0;
};

// The region itself as a tensor over the buffer's memory.
at::Tensor region_view(const Region& region);
// [n, *sizes] over the buffer's memory. Needs `regular`.
at::Tensor regular_view(const RegionRows& located);
// [sum of numel] over the buffer's memory, or as rows of `width`. Needs `consecutive`.
at::Tensor consecutive_view(const RegionRows& located);
at::Tensor consecutive_rows(const RegionRows& located, int64_t width);

// Copies the regions one after the other, each in row-major order, into `out` (contiguous, of as
// many elements as all regions together).
void gather_into(const Regions& regions, const at::Tensor& out);

// The reverse: adds to each region its part of `values` (contiguous). Regions may coincide or
// overlap: contributions are summed, in order. A region without a buffer is skipped.
void scatter_add(const at::Tensor& values, const Regions& regions);

// Contiguous, with no pending conjugation or negation: what the kernels above read.
at::Tensor plain(const at::Tensor& tensor);

// Region to region, of the same number of elements each: to = from, and to += from.
void copy_regions(const Regions& from, const Regions& to);
void add_regions(const Regions& from, const Regions& to);

// target[indices[r]] += rows[r], rows with index `skip` left out; target [V, D] contiguous.
// `times`: `rows` is of as many blocks of equal size, and each comes so many times. `fresh`: the
// target is uninitialized, and what no row is added to becomes zero.
void index_add_rows(const at::Tensor& target, const at::Tensor& indices, const at::Tensor& rows,
                    int64_t skip, at::IntArrayRef times = {}, bool fresh = false);

}  // namespace autobatch

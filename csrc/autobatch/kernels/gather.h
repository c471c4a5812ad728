// Copies regions and adds to regions. One call handles the regions of many values, in any buffers.
// On CPUs, kernels of this library read lists of (pointer, geometry). For other devices, see
// gather_device.h.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/graph/tensor_views.h"
#include "autobatch/kernels/segment_reduce.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace autobatch {

// A strided region of a buffer. `buffer` is a 1-D tensor (a slab) or a graph input's data, and
// `offset` counts elements from the data pointer of the buffer.
struct Region {
  const at::Tensor* buffer = nullptr;
  int64_t offset = 0;
  const Geometry* geometry = nullptr;
  // Whether the memory is uninitialized. If so, the first addition overwrites the memory. On a CPU,
  // a fresh region is contiguous.
  bool fresh = false;

  // Returns the address of the first element.
  const char* address() const {
    return static_cast<const char*>(buffer->const_data_ptr()) +
           offset * static_cast<int64_t>(buffer->element_size());
  }
};

using Regions = std::vector<Region>;

// The arrangement of the regions of a batch's members in memory.
struct Layout {
  bool uniform = true;  // all regions have the same geometry
  bool same_buffer = true;
  bool same = true;         // all regions are the same region
  bool regular = true;      // one buffer, one geometry, equal distances (`step`)
  bool consecutive = true;  // one buffer; contiguous regions without gaps between them
  int64_t step = 0;         // elements from one region to the next, if regular
  int64_t numel = 0;        // number of elements of all regions together
};
Layout layout_of(const Regions& regions);

// The regions of a batch's members, and their layout. If the regions are known to be evenly spaced,
// only the first one is stored until all() is called.
class RegionRows {
 public:
  RegionRows() = default;
  explicit RegionRows(Regions regions)
      : layout_(layout_of(regions)),
        regions_(std::move(regions)),
        count_(static_cast<int64_t>(regions_.size())) {}
  // Describes `count` regions. The first region is `first`, and each next region starts `step`
  // elements later.
  RegionRows(const Region& first, int64_t count, int64_t step);

  const Layout& layout() const { return layout_; }
  const Region& first() const { return regions_.front(); }
  int64_t count() const { return count_; }
  const Regions& all() const;
  // Returns all regions, or only the first one if they are known to be evenly spaced.
  const Regions& listed() const { return regions_; }

 private:
  Layout layout_;
  mutable Regions regions_;  // all regions, or only the first one
  int64_t count_ = 0;
};

// Returns the region as a tensor over the buffer's memory.
at::Tensor region_view(const Region& region);
// Returns all regions as one tensor [n, *sizes] over the buffer's memory. The layout must be
// `regular`.
at::Tensor regular_view(const RegionRows& located);
// Returns the elements of all regions, 1-D or as rows of `width` elements, over the buffer's
// memory. The layout must be `consecutive`.
at::Tensor consecutive_view(const RegionRows& located);
at::Tensor consecutive_rows(const RegionRows& located, int64_t width);

// Returns the elements of all regions as one 1-D tensor. flat_of() returns a view of the buffer's
// memory if the layout is `consecutive`, and a copy otherwise.
at::Tensor gathered_copy(const RegionRows& located);
at::Tensor flat_of(const RegionRows& located);
// Returns all regions as one tensor [n, *sizes]. All regions must have the same sizes. The result
// is a view of the buffer's memory if the layout is `regular`, and a contiguous tensor otherwise.
at::Tensor stacked_of(const RegionRows& located);

// Copies the regions one after the other, each in row-major order, into `out`. `out` is contiguous
// and has as many elements as all regions together.
void gather_into(const Regions& regions, const at::Tensor& out);

// The counterpart of gather_into. Adds to each region its part of `values` (contiguous). Regions
// may coincide or overlap; a CPU adds the contributions in the order of the regions. A region
// without a buffer is skipped.
void scatter_add(const at::Tensor& values, const Regions& regions);

// Returns the tensor in the form that the kernels above read: dense, contiguous and without pending
// conjugation or negation.
at::Tensor plain(const at::Tensor& tensor);

// Compute to = from (copy_regions) or to += from (add_regions) for each pair of regions. The
// regions of a pair have the same number of elements.
void copy_regions(const Regions& from, const Regions& to);
void add_regions(const Regions& from, const Regions& to);

// Computes target[indices[r]] += rows[r] for all r with indices[r] != skip. `target` is [V, D],
// contiguous. If `times` is given, `rows` consists of times.size() blocks of equal size. Block b is
// added times[b] times, each time with the next indices. `fresh`: whether the target is
// uninitialized. Rows of a fresh target that receive no addition become zero.
void index_add_rows(const at::Tensor& target, const at::Tensor& indices, const at::Tensor& rows,
                    int64_t skip, at::IntArrayRef times = {}, bool fresh = false);

}  // namespace autobatch

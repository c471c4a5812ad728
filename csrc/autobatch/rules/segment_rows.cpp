#include "autobatch/rules/segment_rows.h"

#include "autobatch/common/pool.h"

#include <ATen/core/DimVector.h>

#include <algorithm>

namespace autobatch {
namespace {

using at::Tensor;

// `entries` has one entry for each dimension. Moves the entries of the range after the entries of
// all inner dimensions except the last one.
at::DimVector by_segment(at::IntArrayRef entries, const Range& range) {
  at::DimVector moved(entries.begin(), entries.end());
  std::rotate(moved.begin() + range.first, moved.begin() + range.last, moved.end() - 1);
  return moved;
}

// Returns the strides, in the order of the operand's dimensions, of memory that is contiguous in
// the order of by_segment().
at::DimVector strides_by_operand(at::IntArrayRef sizes, const Range& range) {
  at::DimVector moved = by_segment(sizes, range);
  int64_t step = 1;
  for (size_t d = moved.size(); d-- > 0;) step *= std::exchange(moved[d], step);
  std::rotate(moved.begin() + range.first, moved.end() - 1 - (range.last - range.first),
              moved.end() - 1);
  return moved;
}

Tensor gathered(const Regions& regions, int64_t width, const at::TensorOptions& options) {
  int64_t numel = 0;
  for (const Region& region : regions) numel += region.geometry->numel;
  Tensor out = pooled_empty({numel / width, width}, options);
  gather_into(regions, out);
  return out;
}

}  // namespace

Tensor rows_by_segment(const BatchView& batch, const Range& range) {
  GeometryTable geometries;
  Regions regions;
  for (int64_t m = 0; m < batch.size(); ++m) {
    Region region = batch.operand_region(m, 0);
    const Geometry& g = *region.geometry;
    region.geometry = geometries.intern(by_segment(g.sizes, range), by_segment(g.strides, range));
    regions.push_back(region);
  }
  const Value& first = batch.operand_value(0, 0);
  return gathered(regions, first.geometry->sizes.back(), first.options());
}

Tensor rows_by_operand(const BatchView& batch, const Range& range, const Tensor& rows) {
  GeometryTable geometries;
  const Tensor flat = rows.contiguous().view({-1});
  Regions regions;
  int64_t offset = 0;
  for (int64_t m = 0; m < batch.size(); ++m) {
    const Geometry& g = *batch.operand_value(m, 0).geometry;
    regions.push_back(
        {&flat, offset, geometries.intern(g.sizes, strides_by_operand(g.sizes, range))});
    offset += g.numel;
  }
  return gathered(regions, rows.size(1), rows.options());
}

}  // namespace autobatch

// GeometryTable: interned sizes and strides, and the properties that follow from them.
#include "autobatch/common/overlap.h"
#include "autobatch/graph/graph.h"

#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

uint64_t hash_combine(uint64_t seed, uint64_t value) {
  value *= 0x9e3779b97f4a7c15ull;
  value ^= value >> 32;
  return (seed ^ value) * 0xff51afd7ed558ccdull;
}

uint64_t hash_geometry(at::IntArrayRef sizes, at::IntArrayRef strides) {
  uint64_t hash = sizes.size();
  for (int64_t size : sizes) hash = hash_combine(hash, static_cast<uint64_t>(size));
  for (int64_t stride : strides) hash = hash_combine(hash, static_cast<uint64_t>(stride));
  return hash;
}

// Computes the members that follow from sizes and strides, except `canonical`. Returns whether the
// dimensions are laid out in row-major order without interleaving.
bool describe(Geometry& g) {
  g.numel = 1;
  for (int64_t size : g.sizes) g.numel *= size;
  g.extent = g.numel == 0 ? 0 : 1;
  bool row_major = true;
  int64_t inner_span = 1;  // number of elements that the visited dimensions span, gaps included
  int64_t dense_step = 1;
  for (size_t d = g.sizes.size(); d-- > 0;) {
    if (g.sizes[d] == 1) continue;
    if (g.numel != 0) g.extent += (g.sizes[d] - 1) * g.strides[d];
    if (g.strides[d] != dense_step) g.contiguous = false;
    if (g.strides[d] < inner_span) row_major = false;
    inner_span = std::max(inner_span, g.strides[d] * g.sizes[d]);
    dense_step *= g.sizes[d];
  }
  if (g.numel == 0) g.contiguous = true;
  g.overlapping = overlaps(g.sizes, g.strides);
  return row_major || g.numel == 0;
}

}  // namespace

// Whether two indices refer to the same element. `extent` is the size of the memory range that the
// tensor spans, in elements.
static bool reaches_twice(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t extent) {
  std::vector<uint8_t> seen(static_cast<size_t>(extent), 0);
  c10::SmallVector<int64_t, 6> index(sizes.size(), 0);
  int64_t offset = 0;
  for (size_t moved = 0; moved <= sizes.size();) {
    if (std::exchange(seen[static_cast<size_t>(offset)], 1) != 0) return true;
    for (moved = 1; moved <= sizes.size(); ++moved) {  // the last dimension varies fastest
      const size_t d = sizes.size() - moved;
      offset += strides[d];
      if (++index[d] < sizes[d]) break;
      offset -= strides[d] * sizes[d];
      index[d] = 0;
    }
  }
  return false;
}

bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides) {
  constexpr int64_t kMostLookedAt = 1 << 14;
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims;  // stride and size of each dimension
  int64_t extent = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return false;
    extent += strides[d] * (sizes[d] - 1);
    if (sizes[d] > 1) dims.emplace_back(strides[d], sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;  // the furthest offset covered so far
  for (const auto& [stride, size] : dims) {
    if (stride == 0) return true;
    if (stride <= last) return extent > kMostLookedAt || reaches_twice(sizes, strides, extent);
    last += stride * (size - 1);
  }
  return false;
}

const Geometry* GeometryTable::intern(at::IntArrayRef sizes, at::IntArrayRef strides) {
  const uint64_t hash = hash_geometry(sizes, strides);
  const auto found = index_.find(hash);
  const Geometry* first = found == index_.end() ? nullptr : found->second;
  for (const Geometry* g = first; g != nullptr; g = g->next) {
    if (sizes == at::IntArrayRef(g->sizes) && strides == at::IntArrayRef(g->strides)) return g;
  }
  Geometry& g = entries_.emplace_back();
  g.sizes = sizes.vec();
  g.strides = strides.vec();
  g.next = first;
  index_[hash] = &g;
  const bool row_major = describe(g);
  const at::DimVector dense = c10::contiguous_strides(sizes);
  const bool is_dense = at::IntArrayRef(dense) == strides;
  g.canonical = row_major && !is_dense ? intern(g.sizes, dense) : &g;
  return &g;
}

const Geometry* GeometryTable::intern_contiguous(at::IntArrayRef sizes) {
  const at::DimVector strides = c10::contiguous_strides(sizes);
  return intern(sizes, strides);
}

}  // namespace autobatch

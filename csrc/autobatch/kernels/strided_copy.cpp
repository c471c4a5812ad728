#include "autobatch/kernels/strided_copy.h"

#include "autobatch/kernels/cpu_dispatch.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

namespace autobatch {
namespace {

// Describes the copy of a matrix: to[i * to_step + j] = from[i * row_step + j * column_step].
struct Plane {
  int64_t rows = 1, columns = 1;
  int64_t row_step = 0, column_step = 0, to_step = 0;
};

template <int64_t item>
void copy_plane(const char* from, char* to, const Plane& p) {
  if constexpr (item == sizeof(float)) {
    if (p.row_step == 1 && p.rows > 1 && cpu_kernels() != nullptr) {
      // The kernel only moves bits, so values of any 4-byte type can be treated as floats.
      return cpu_kernels()->turn(reinterpret_cast<const float*>(from), p.column_step, p.columns,
                                 p.rows, reinterpret_cast<float*>(to), p.to_step);
    }
  }
  constexpr int64_t kTile = 16;  // both tiles fit into the L1 cache
  for (int64_t i0 = 0; i0 < p.rows; i0 += kTile) {
    for (int64_t j0 = 0; j0 < p.columns; j0 += kTile) {
      const int64_t i1 = std::min(i0 + kTile, p.rows), j1 = std::min(j0 + kTile, p.columns);
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t j = j0; j < j1; ++j) {
          std::memcpy(to + (i * p.to_step + j) * item,
                      from + (i * p.row_step + j * p.column_step) * item, item);
        }
      }
    }
  }
}

// A dimension with more than one element, and its strides in the tensor and in the copy.
struct Dim {
  int64_t size, stride, to_stride;
};
using Dims = c10::SmallVector<Dim, 6>;

Dims dims_of(const Geometry& g) {
  Dims dims;
  int64_t to_stride = 1;
  for (size_t d = g.sizes.size(); d-- > 0;) {
    if (g.sizes[d] == 1) continue;
    dims.push_back({g.sizes[d], g.strides[d], to_stride});
    to_stride *= g.sizes[d];
  }
  std::reverse(dims.begin(), dims.end());
  return dims;
}

template <int64_t item>
void copy_planes(const char* from, char* to, Dims dims) {
  Plane plane;
  plane.columns = dims.back().size;
  plane.column_step = dims.back().stride;
  dims.pop_back();
  const auto dense = std::ranges::find(dims, 1, &Dim::stride);
  if (dense != dims.end()) {
    plane.rows = dense->size;
    plane.row_step = 1;
    plane.to_step = dense->to_stride;
    dims.erase(dense);
  }
  c10::SmallVector<int64_t, 6> index(dims.size(), 0);
  while (true) {
    copy_plane<item>(from, to, plane);
    size_t d = dims.size();
    while (d > 0) {
      const Dim& dim = dims[--d];
      from += dim.stride * item, to += dim.to_stride * item;
      if (++index[d] < dim.size) break;
      from -= dim.stride * dim.size * item, to -= dim.to_stride * dim.size * item;
      index[d] = 0;
      if (d == 0) return;
    }
    if (dims.empty()) return;
  }
}

}  // namespace

void copy_strided(const char* from, const Geometry& g, char* out, int64_t item) {
  if (g.numel == 0) return;
  const Dims dims = dims_of(g);
  if (dims.empty()) return void(std::memcpy(out, from, static_cast<size_t>(item)));
  switch (item) {
    case 1:
      return copy_planes<1>(from, out, dims);
    case 2:
      return copy_planes<2>(from, out, dims);
    case 4:
      return copy_planes<4>(from, out, dims);
    case 8:
      return copy_planes<8>(from, out, dims);
    default:
      TORCH_INTERNAL_ASSERT(item == 16, "unsupported element size: ", item, " bytes");
      return copy_planes<16>(from, out, dims);
  }
}

}  // namespace autobatch

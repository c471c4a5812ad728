// A table of regions, in the form that the CUDA kernels read. The regions are copied to or from the
// packed side, which is one contiguous tensor. A small table is a parameter of the kernel. A larger
// table is sent to the device in one copy. This file includes no header of torch or CUDA, so that
// the index computations of the kernels can be tested on any machine.
#pragma once

#include "autobatch/kernels/cuda/device_code.h"

#include <cstdint>

namespace autobatch::cuda {

enum class Element : uint8_t { kHalf, kBFloat16, kFloat, kDouble };

inline constexpr int kMostDims = 6;

// The shape of a region. A region consists of contiguous runs, and `sizes` and `strides` describe a
// loop over the runs. All lengths in this file count units. A unit has 16 bytes if all regions of
// the table are aligned to 16 bytes, and fewer bytes otherwise.
struct Shape {
  int64_t run;  // units in one run
  int32_t dims;
  int64_t sizes[kMostDims], strides[kMostDims];
};

// A region: its address, and its part of the packed side.
struct Entry {
  uint64_t address;
  int64_t start;  // units from the start of the packed side
  int32_t shape;
  int32_t count;  // number of contributions to the region; `first`: index of the first one
  int64_t first;
};

// The table in the form that a kernel reads. Regions are in the order of the packed side, without
// gaps.
struct Table {
  const Entry* entries;
  const Shape* shapes;
  const int64_t* contributions;  // start of each contribution in the values
  int64_t num_entries;
  int64_t uniform;  // units of each region if all have the same length, otherwise 0
  int64_t total;    // total number of units of all regions
};

// The sizes of a table. The bytes of a table contain first the entries, then the shapes, then the
// contributions.
struct Layout {
  int64_t num_entries, num_shapes, num_contributions;
  int64_t uniform, total;  // see Table

  AUTOBATCH_DEVICE int64_t num_bytes() const {
    return static_cast<int64_t>(num_entries * sizeof(Entry) + num_shapes * sizeof(Shape) +
                                num_contributions * sizeof(int64_t));
  }

  AUTOBATCH_DEVICE Table at(const char* bytes) const {
    const char* after_entries = bytes + num_entries * sizeof(Entry);
    const char* after_shapes = after_entries + num_shapes * sizeof(Shape);
    return {reinterpret_cast<const Entry*>(bytes),
            reinterpret_cast<const Shape*>(after_entries),
            reinterpret_cast<const int64_t*>(after_shapes),
            num_entries,
            uniform,
            total};
  }
};

// Returns the index of the last entry that starts at or before `i`.
template <class E>
AUTOBATCH_DEVICE int64_t find_last(const E* entries, int64_t num_entries, int64_t i) {
  int64_t low = 0, high = num_entries;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (entries[middle].start <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Returns the index of the region that unit i of the packed side belongs to.
AUTOBATCH_DEVICE inline int64_t find_entry(const Table& table, int64_t i) {
  if (table.uniform > 0) return i / table.uniform;
  return find_last(table.entries, table.num_entries, i);
}

// Returns the offset, in a region, of the region's unit i in row-major order.
AUTOBATCH_DEVICE inline int64_t offset_in(const Shape& shape, int64_t i) {
  if (shape.dims == 0) return i;
  int64_t rest = i / shape.run;
  int64_t offset = i % shape.run;
  for (int32_t d = shape.dims - 1; d >= 0; --d) {
    offset += rest % shape.sizes[d] * shape.strides[d];
    rest /= shape.sizes[d];
  }
  return offset;
}

}  // namespace autobatch::cuda

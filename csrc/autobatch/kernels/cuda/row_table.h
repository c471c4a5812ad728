// Lookups of rows (row_lookups.h) in the form that the CUDA kernel reads. The table has one entry
// for each member. Like region_layout.h, this file includes no header of torch or CUDA.
#pragma once

#include <cstdint>

namespace autobatch::cuda {

inline constexpr int kMostLookupDims = 3;
inline constexpr int kMostLists = 2;
// The row number for an index that is out of range. No tensor has this row, so the kernel that
// reads the row fails.
inline constexpr int64_t kNoRow = int64_t{1} << 40;

struct RowEntry {
  struct List {
    uint64_t values;
    int64_t length, step;
    int64_t strides[kMostLookupDims];
  };
  int64_t start;  // number of lookups of all previous members
  int64_t first;
  // Sizes and steps of the member's dimensions. If the member has fewer than kMostLookupDims
  // dimensions, the first sizes are 1.
  int64_t sizes[kMostLookupDims], steps[kMostLookupDims];
  List lists[kMostLists];
};

// The data that all entries have in common.
struct RowLayout {
  int64_t num_entries;
  int64_t total;  // number of lookups of all entries
  int32_t lists;
  bool is_int[kMostLists];  // for each list: whether its values are int32 (otherwise int64)
  bool from_end;
};

}  // namespace autobatch::cuda

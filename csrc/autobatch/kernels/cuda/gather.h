// The CUDA kernels for regions and for lookups of rows. Each call is one launch, for any number of
// regions and buffers. This file and gather.cu include no torch header, so any version of nvcc can
// compile them (`make cuda-check`).
#pragma once

#include "autobatch/kernels/cuda/region_layout.h"
#include "autobatch/kernels/cuda/row_table.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace autobatch::cuda {

// Whether this library contains the kernels for the current device. The kernels are compiled for a
// list of architectures, from compute capability 7.0 on.
bool has_kernels();

// A table of at most this many bytes is passed as a parameter of the kernel. On an H100, a
// parameter of 4 KB costs nothing, and a parameter of 32 KB costs 2 to 8 us. A copy from pinned
// memory and its event cost 3 to 5 us, and the copy also needs two allocations.
inline constexpr int64_t kMostParameterBytes = 32'000;

struct SentTable {
  Layout layout;
  const char* bytes;
  bool on_host;  // `bytes` is in host memory, to be passed as a parameter
};

struct SentRows {
  RowLayout layout;
  const RowEntry* entries;
  bool on_host;  // `entries` is in host memory, to be passed as a parameter

  int64_t num_bytes() const { return layout.num_entries * static_cast<int64_t>(sizeof(RowEntry)); }
};

// All functions return CUDA's error code, which is 0 if the launch succeeded. No function waits for
// the device.

// `gather` copies the regions into `packed`, and `unpack` copies `packed` into the regions. `unit`:
// bytes of one unit, a power of two up to 16.
int gather(const SentTable& table, int unit, void* packed, CUstream_st* stream);
int unpack(const SentTable& table, int unit, const void* packed, CUstream_st* stream);

// Adds to each region its part of `values`, by atomic additions. If regions coincide or overlap,
// the order of the additions is undefined. A unit is `width` elements.
int scatter_add(const SentTable& table, Element element, int width, const void* values,
                CUstream_st* stream);

// Like scatter_add, but for regions that do not overlap. The contributions to a region are added in
// the order of `values`.
int scatter_add_in_order(const SentTable& table, Element element, int width, const void* values,
                         CUstream_st* stream);

// Writes the row of each lookup to `out`. For an index out of range, writes kNoRow.
int find_rows(const SentRows& rows, int64_t* out, CUstream_st* stream);

}  // namespace autobatch::cuda

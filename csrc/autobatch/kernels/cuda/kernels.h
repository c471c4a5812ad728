// The CUDA kernels: one launch each, whatever the number of regions and of the buffers they lie in.
// No torch header in here or in kernels.cu, so that any nvcc compiles them (`make cuda-check`).
#pragma once

#include "autobatch/kernels/cuda/region_layout.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace autobatch::cuda {

// Whether this library has the kernels for the current device: they are compiled for a list of
// architectures, from 7.0 on.
bool has_kernels();

// Up to so many bytes a table goes with the launch, as a parameter of the kernel. On an H100 4 KB
// cost nothing so, and 32 KB 2 to 8 us; a copy from pinned memory and its event cost 3 to 5, and
// the two allocations come on top.
inline constexpr int64_t kMostParameterBytes = 32'000;

struct SentTable {
  Layout layout;
  const char* bytes;
  bool on_host;  // they are a parameter
};

// All return CUDA's error code: 0 if the launch went well. None waits for the device.

// From the regions into `packed`, and back. `unit`: bytes of one, a power of two up to 16.
int gather(const SentTable& table, int unit, void* packed, CUstream_st* stream);
int unpack(const SentTable& table, int unit, const void* packed, CUstream_st* stream);

// Adds to each region its part of `values`, by atomic additions: in any order where regions
// coincide or overlap. A unit is `width` elements.
int scatter_add(const SentTable& table, Element element, int width, const void* values,
                CUstream_st* stream);

// The same for regions that do not overlap, each with its contributions, added in their order.
int scatter_add_in_order(const SentTable& table, Element element, int width, const void* values,
                         CUstream_st* stream);

}  // namespace autobatch::cuda

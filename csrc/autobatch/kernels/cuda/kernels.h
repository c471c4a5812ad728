// The CUDA kernels: one launch each, whatever the number of regions and of the buffers they lie in.
// No torch header in here or in kernels.cu, so that any nvcc compiles them (`make cuda-check`).
#pragma once

#include "autobatch/kernels/cuda/region_layout.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace autobatch::cuda {

enum class Element : uint8_t { kHalf, kBFloat16, kFloat, kDouble };

// Whether this library has the kernels for the current device: they are compiled for a list of
// architectures, from 7.0 on.
bool has_kernels();

// All return CUDA's error code: 0 if the launch went well. None waits for the device.

// From the regions into `packed`, and back. `unit`: bytes of one, a power of two up to 16.
int gather(const Table& table, int unit, void* packed, CUstream_st* stream);
int unpack(const Table& table, int unit, const void* packed, CUstream_st* stream);

// Adds to each region its part of `values`, by atomic additions: in any order where regions
// coincide or overlap. A unit is `width` elements.
int scatter_add(const Table& table, Element element, int width, const void* values,
                CUstream_st* stream);

// The same for regions that do not overlap, each with its contributions, added in their order.
int scatter_add_in_order(const Table& table, Element element, int width, const void* values,
                         CUstream_st* stream);

}  // namespace autobatch::cuda

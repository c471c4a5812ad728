// An elementwise pass (fused_elementwise.h) as its CUDA kernel sees it: the steps are parameters of
// one launch. No torch and no CUDA header in here, as in region_layout.h.
#pragma once

#include "autobatch/kernels/cuda/region_layout.h"
#include "autobatch/kernels/pointwise_op.h"

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace autobatch::cuda {

// Where rows lie, in elements from one to the next, and the runs within a row.
struct ElementwisePlace {
  uint64_t address;  // of the first row; of a temporary: in the scratch memory of each block
  int32_t row, mid;
  bool temporary;
};

// For `mid` runs of `inner` elements of each row.
struct ElementwiseStep {
  double number, scale;
  ElementwisePlace out, a, b;
  int32_t mid, inner;
  Pointwise code;
};

// A block of threads runs all steps for its rows, one step after the other.
struct ElementwiseTask {
  int64_t rows;
  int32_t rows_per_block;
  int32_t scratch_bytes;  // of a block, for temporaries
  char* scratch;          // memory for those of all blocks; null: they fit into shared memory
  Element element;
};

// At most so many bytes of temporaries lie in shared memory, which all devices have.
inline constexpr int64_t kMostSharedBytes = 48 << 10;
// More steps take further launches, and temporaries in `scratch`.
inline constexpr int64_t kMostElementwiseSteps = 312;

// CUDA's error code: 0 if the launches went well. Does not wait for the device.
int run_elementwise(const ElementwiseTask& task, const ElementwiseStep* steps, int64_t num_steps,
                    CUstream_st* stream);

}  // namespace autobatch::cuda

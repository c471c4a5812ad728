// An elementwise program (elementwise_program.h) in the form that the CUDA kernel takes. The steps
// are parameters of one launch. Like region_layout.h, this file includes no header of torch or
// CUDA.
#pragma once

#include "autobatch/kernels/cuda/region_layout.h"
#include "autobatch/kernels/elementwise_op.h"

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace autobatch::cuda {

// The place of an operand or a result. `row`: elements from one row to the next. `mid`: elements
// from one run of a row to the next.
struct KernelPlace {
  uint64_t address;  // of the first row; for a temporary: byte offset in a block's scratch memory
  int32_t row, mid;
  bool temporary;
};

// One op. In each row, it handles `mid` runs of `inner` elements.
struct KernelStep {
  double number, scale;
  KernelPlace out, a, b;
  int32_t mid, inner;
  ElementwiseCode code;
};

// A program without its steps. A block of threads runs all steps for its rows, one step after the
// other.
struct KernelTask {
  int64_t rows;
  int32_t rows_per_block;
  int32_t scratch_bytes;  // for the temporaries of one block
  char* scratch;          // for the temporaries of all blocks; null if they are in shared memory
  Element element;
};

// Maximum size of temporaries in shared memory. All devices have this much shared memory.
inline constexpr int64_t kMostSharedBytes = 48 << 10;
// Maximum number of steps in a launch. A program with more steps takes several launches, and its
// temporaries are in `scratch`.
inline constexpr int64_t kMostKernelSteps = 312;

// Launches the kernel and returns CUDA's error code, which is 0 if the launches succeeded. Does not
// wait for the device.
int launch_elementwise(const KernelTask& task, const KernelStep* steps, int64_t num_steps,
                       CUstream_st* stream);

}  // namespace autobatch::cuda

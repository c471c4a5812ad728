// The CUDA kernels on the CPU (cuda_on_cpu.h): variants for two architectures, and copies with
// planted faults, which the tests must detect.
#pragma once

#include "autobatch/kernels/cuda/elementwise.h"
#include "autobatch/kernels/cuda/gather.h"
#include "cuda_on_cpu.h"

#include <vector>

namespace autobatch {

struct KernelsOnCpu {
  const char* name;
  int (*gather)(const cuda::SentTable&, int unit, void* packed, CUstream_st*);
  int (*unpack)(const cuda::SentTable&, int unit, const void* packed, CUstream_st*);
  int (*scatter_add)(const cuda::SentTable&, cuda::Element, int width, const void*, CUstream_st*);
  int (*scatter_add_in_order)(const cuda::SentTable&, cuda::Element, int width, const void*,
                              CUstream_st*);
  int (*find_rows)(const cuda::SentRows&, int64_t* out, CUstream_st*);
};

// Runs the kernel of elementwise.cu.
int run_elementwise_on_cpu(const cuda::KernelTask& task, const cuda::KernelStep* steps,
                           int64_t num_steps);

extern const std::vector<KernelsOnCpu> kKernelsOnCpu;
extern const std::vector<KernelsOnCpu> kPlantedFaults;

}  // namespace autobatch

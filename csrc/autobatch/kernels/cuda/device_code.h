// AUTOBATCH_DEVICE marks functions that both the host and CUDA kernels call.
#pragma once

#if defined(__CUDACC__)
#define AUTOBATCH_DEVICE __host__ __device__
#else
#define AUTOBATCH_DEVICE
#endif

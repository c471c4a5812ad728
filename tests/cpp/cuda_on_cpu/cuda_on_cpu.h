// The part of CUDA that the .cu files use, for a CPU compiler. Tests run the source of the kernels
// without a GPU, also under AddressSanitizer. Threads run one after another, each to its end, in an
// order that is shuffled across all blocks, so that results that depend on the order differ. A
// kernel with __syncthreads or shared memory runs in lockstep: blocks in shuffled order, one thread
// per block.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define AUTOBATCH_CUDA_ON_CPU 1
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(threads)

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace cuda_on_cpu {

struct Index {
  unsigned x = 0;
};

// Settings for running kernels, and counts of launches.
struct Launcher {
  uint64_t seed = 0;              // of the thread order; incremented by each launch
  std::vector<int64_t> selected;  // blocks to run; empty: the whole grid
  int64_t launches = 0;
  int64_t blocks = 0;  // grid size of the last launch

  std::vector<int64_t> threads_in_order(int64_t grid, int64_t threads) {
    std::vector<int64_t> order;
    const auto add_block = [&](int64_t block) {
      order.resize(order.size() + static_cast<size_t>(threads));
      std::iota(order.end() - threads, order.end(), block * threads);
    };
    for (const int64_t block : selected) add_block(block);
    for (int64_t block = 0; selected.empty() && block < grid; ++block) add_block(block);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(seed++));
    return order;
  }
};

inline Launcher launcher;

}  // namespace cuda_on_cpu

inline cuda_on_cpu::Index threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

// Runs a kernel to its end, like <<<blocks, threads, 0, stream>>> and a synchronisation.
template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), int blocks, int threads, cudaStream_t,
         const Arguments&... arguments) {
  ++launcher.launches;
  launcher.blocks = blocks;
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(threads);
  for (const int64_t thread : launcher.threads_in_order(blocks, threads)) {
    blockIdx.x = static_cast<unsigned>(thread / threads);
    threadIdx.x = static_cast<unsigned>(thread % threads);
    kernel(arguments...);
  }
}

// Shared memory of the running block. Filled with NaN when the block starts.
inline std::vector<char> shared_bytes;
inline char* shared_memory() { return shared_bytes.data(); }

// Stores of the running block that take effect at its next __syncthreads().
inline std::vector<std::function<void()>> stores;
template <class T>
void store_later(T* to, T value) {
  stores.emplace_back([to, value] { *to = value; });
}

// Runs a kernel that calls __syncthreads(). Each block has one thread, which does the work of all
// threads between two calls. Its stores take effect at the next call, so that a read of another
// thread's store without a call in between gives the old value.
template <class... Parameters, class... Arguments>
void run_in_lockstep(void (*kernel)(Parameters...), unsigned blocks, size_t shared, cudaStream_t,
                     const Arguments&... arguments) {
  ++launcher.launches;
  launcher.blocks = blocks;
  gridDim.x = blocks;
  blockDim.x = 1;
  threadIdx.x = 0;
  for (const int64_t block : launcher.threads_in_order(blocks, 1)) {
    shared_bytes.assign(shared, static_cast<char>(0xff));
    blockIdx.x = static_cast<unsigned>(block);
    kernel(arguments...);
  }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  for (const auto& store : cuda_on_cpu::stores) store();
  cuda_on_cpu::stores.clear();
}

inline float max(float a, float b) { return a < b ? b : a; }
inline double max(double a, double b) { return a < b ? b : a; }

// ------------------------------------------------------------------------------- the runtime

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
struct cudaFuncAttributes {};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return cudaSuccess;
}

// --------------------------------------------------------------------------------- the types

// Types with CUDA's alignment, so that UndefinedBehaviorSanitizer finds misaligned accesses.
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using __half = c10::Half;
using __nv_bfloat16 = c10::BFloat16;
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __half __hadd(__half a, __half b) { return a + b; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float __half2float(__half a) { return a; }
inline __half __float2half(float a) { return a; }
inline float __bfloat162float(__nv_bfloat16 a) { return a; }
inline __nv_bfloat16 __float2bfloat16(float a) { return a; }

// ------------------------------------------------------------------------------ the additions

inline void atomicAdd(float* to, float value) { *to += value; }
inline void atomicAdd(double* to, double value) { *to += value; }
inline void atomicAdd(__half* to, __half value) { *to += value; }
inline void atomicAdd(__nv_bfloat16* to, __nv_bfloat16 value) { *to += value; }

template <class Pair>
void add_pair(Pair* to, Pair value) {
  *to = {to->x + value.x, to->y + value.y};
}
inline void atomicAdd(__half2* to, __half2 value) { add_pair(to, value); }
inline void atomicAdd(__nv_bfloat162* to, __nv_bfloat162 value) { add_pair(to, value); }
inline void atomicAdd(float4* to, float4 value) {
  *to = {to->x + value.x, to->y + value.y, to->z + value.z, to->w + value.w};
}

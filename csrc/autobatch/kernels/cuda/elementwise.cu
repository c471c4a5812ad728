#include "autobatch/kernels/cuda/elementwise.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace autobatch::cuda {
namespace {

constexpr int kThreads = 256;

// The parameter of the kernel: a program with at most kSteps steps. Most programs have at most 38
// steps. A launch copies the whole parameter, including unused steps.
template <int kSteps>
struct KernelParameter {
  KernelTask task;
  int32_t num_steps;
  KernelStep steps[kSteps];
};
using SmallProgram = KernelParameter<38>;
using LargeProgram = KernelParameter<kMostKernelSteps>;
static_assert(sizeof(SmallProgram) <= 4096 && sizeof(LargeProgram) <= 32'764,
              "parameters of a launch");

// The type in which eager mode computes for elements of type T: float for half types, and T
// otherwise.
template <class T>
struct Computed {
  using Type = T;
};
template <>
struct Computed<__half> {
  using Type = float;
};
template <>
struct Computed<__nv_bfloat16> {
  using Type = float;
};

template <class T>
__device__ typename Computed<T>::Type load(const T* from) {
  return *from;
}
__device__ float load(const __half* from) { return __half2float(*from); }
__device__ float load(const __nv_bfloat16* from) { return __bfloat162float(*from); }

#if defined(AUTOBATCH_CUDA_ON_CPU)  // other threads see the value after the next __syncthreads
template <class T>
void put(T* to, T value) {
  cuda_on_cpu::store_later(to, value);
}
#else
template <class T>
__device__ void put(T* to, T value) {
  *to = value;
}
#endif
__device__ void store(float* to, float value) { put(to, value); }
__device__ void store(double* to, double value) { put(to, value); }
__device__ void store(__half* to, float value) { put(to, __float2half(value)); }
__device__ void store(__nv_bfloat16* to, float value) { put(to, __float2bfloat16(value)); }

// Scalar functions that elementwise_ops.inc uses and that std does not have. The formulas are from
// ATen (aten/src/ATen/native/cuda).
template <class C>
__device__ C relu(C a) {
  return a != a ? a : ::max(a, C(0));
}
template <class C>
__device__ C sigmoid(C a) {
  return C(1) / (C(1) + std::exp(-a));
}
template <class C>
__device__ C select(bool mask, C a, C b) {
  return mask ? a : b;
}

// `V`: the type in which the op computes.
template <class V>
__device__ V apply(ElementwiseCode code, V number, V scale, V a, V b) {
  using std::abs, std::cos, std::erf, std::exp, std::expm1, std::log, std::log1p, std::sin,
      std::sqrt, std::tanh;
  switch (code) {
    case ElementwiseCode::kCopy:
      return a;
    case ElementwiseCode::kNeg:
      return -a;
    case ElementwiseCode::kAddNumber:
      return number + scale * a;
    case ElementwiseCode::kMulNumber:
      return number * a;
    case ElementwiseCode::kDivNumber:
      return a / number;
    case ElementwiseCode::kAdd:
      return a + scale * b;
    case ElementwiseCode::kMul:
      return a * b;
    case ElementwiseCode::kDiv:
      return a / b;
#define FUSED_ELEMENTWISE_OP(Name, op, reads, formula, gradient, ...) \
  case ElementwiseCode::k##Name: {                                    \
    const V x = a;                                                    \
    return formula;                                                   \
  }                                                                   \
  case ElementwiseCode::k##Name##Backward: {                          \
    [[maybe_unused]] const V g = a, x = b, y = b;                     \
    return gradient;                                                  \
  }
#include "autobatch/kernels/elementwise_ops.inc"
  }
  return a;
}

// Returns the address of the block's first row. This is row `first` of the batch, or the start of a
// temporary. A temporary has rows for this block only.
template <class T>
__device__ T* start_of(const KernelPlace& place, char* scratch, int64_t first) {
  if (place.temporary) return reinterpret_cast<T*>(scratch + place.address);
  return reinterpret_cast<T*>(place.address) + first * place.row;
}

__device__ bool is_same(const KernelPlace& x, const KernelPlace& y) {
  return x.address == y.address && x.temporary == y.temporary;
}

// Runs one step. A thread computes one element of one run at a time. In the gradient of a broadcast
// operand, all runs of a row are added to one run. In this case a thread adds the same element of
// all runs.
template <class T>
__device__ void run_step(const KernelStep& step, char* scratch, int64_t first, int rows) {
  using C = typename Computed<T>::Type;
  T* out = start_of<T>(step.out, scratch, first);
  const T* a = start_of<T>(step.a, scratch, first);
  const T* b = is_binary(step.code) ? start_of<T>(step.b, scratch, first) : nullptr;
  const C number = static_cast<C>(step.number), scale = static_cast<C>(step.scale);
  const bool joined = step.out.mid == 0 && step.mid > 1;
  const bool sums = joined && is_same(step.out, step.a);
  const int width = (joined ? 1 : step.mid) * step.inner;
  for (int i = static_cast<int>(threadIdx.x); i < rows * width; i += static_cast<int>(blockDim.x)) {
    const int row = i / width, rest = i % width, k = rest % step.inner;
    int run = rest / step.inner;
    const auto at = [&](const KernelPlace& place) {
      return int64_t{row} * place.row + int64_t{run} * place.mid + k;
    };
    const auto value_of = [&](C x) {
      return apply(step.code, number, scale, x, b == nullptr ? x : load(b + at(step.b)));
    };
    C value = value_of(load(a + at(step.a)));
    if (joined) {
      for (run = 1; run < step.mid; ++run) value = value_of(sums ? value : load(a + at(step.a)));
    }
    store(out + at(step.out), value);
  }
}

template <class T, class Program>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(const __grid_constant__ Program program) {
#if defined(AUTOBATCH_CUDA_ON_CPU)
  char* shared = cuda_on_cpu::shared_memory();
#else
  extern __shared__ __align__(16) char shared[];
#endif
  const KernelTask& task = program.task;
  const int64_t first = int64_t{blockIdx.x} * task.rows_per_block;
  const int64_t left = task.rows - first;
  const int rows = left < task.rows_per_block ? static_cast<int>(left) : task.rows_per_block;
  char* scratch = shared;
  if (task.scratch != nullptr) scratch = task.scratch + int64_t{blockIdx.x} * task.scratch_bytes;
  for (int s = 0; s < program.num_steps; ++s) {
    run_step<T>(program.steps[s], scratch, first, rows);
    __syncthreads();  // the next step reads values that other threads have written
  }
}

template <class T, class Program>
int launch(const KernelTask& task, const KernelStep* steps, int64_t num_steps,
           cudaStream_t stream) {
  Program program;
  program.task = task;
  program.num_steps = static_cast<int32_t>(num_steps);
  std::memcpy(program.steps, steps, static_cast<size_t>(num_steps) * sizeof(KernelStep));
  const auto blocks =
      static_cast<unsigned>((task.rows + task.rows_per_block - 1) / task.rows_per_block);
  const size_t shared = task.scratch == nullptr ? static_cast<size_t>(task.scratch_bytes) : 0;
#if defined(AUTOBATCH_CUDA_ON_CPU)  // tests/cpp/cuda_on_cpu
  cuda_on_cpu::run_in_lockstep(elementwise_kernel<T, Program>, blocks, shared, stream, program);
#else
  elementwise_kernel<T, Program><<<blocks, kThreads, shared, stream>>>(program);
#endif
  return static_cast<int>(cudaGetLastError());
}

template <class T>
int run(const KernelTask& task, const KernelStep* steps, int64_t num_steps, cudaStream_t stream) {
  constexpr auto kSmall = static_cast<int64_t>(sizeof(SmallProgram::steps) / sizeof(KernelStep));
  if (num_steps <= kSmall) return launch<T, SmallProgram>(task, steps, num_steps, stream);
  while (num_steps > 0) {
    const int64_t part = std::min(num_steps, kMostKernelSteps);
    const int error = launch<T, LargeProgram>(task, steps, part, stream);
    if (error != 0) return error;
    steps += part;
    num_steps -= part;
  }
  return 0;
}

}  // namespace

int launch_elementwise(const KernelTask& task, const KernelStep* steps, int64_t num_steps,
                       CUstream_st* stream) {
  if (task.rows == 0 || num_steps == 0) return 0;
  switch (task.element) {
    case Element::kHalf:
      return run<__half>(task, steps, num_steps, stream);
    case Element::kBFloat16:
      return run<__nv_bfloat16>(task, steps, num_steps, stream);
    case Element::kFloat:
      return run<float>(task, steps, num_steps, stream);
    case Element::kDouble:
      return run<double>(task, steps, num_steps, stream);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace autobatch::cuda

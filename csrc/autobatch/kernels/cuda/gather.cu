#include "autobatch/kernels/cuda/gather.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace autobatch::cuda {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "atomic additions of halves need compute capability 7.0; older devices are left to ATen"
#endif

constexpr int kThreads = 256;
// Maximum number of blocks. If there are more units than threads, a thread handles several units.
constexpr int64_t kMostBlocks = int64_t{1} << 16;

int blocks_for(int64_t units) {
  return static_cast<int>(std::min((units + kThreads - 1) / kThreads, kMostBlocks));
}

// The table as a parameter of a kernel: either a pointer to the table, or the table itself.
struct Pointer {
  Table value;
  __device__ Table table() const { return value; }
};
template <int kBytes>
struct Whole {
  Layout layout;
  alignas(16) char bytes[kBytes];
  __device__ Table table() const { return layout.at(bytes); }
};
// All devices accept 4 KB of parameters. From CUDA 12.1 on, the devices that these kernels support
// accept 32,764 bytes. A launch copies the whole parameter, including unused bytes.
using SmallTable = Whole<4000 - sizeof(Layout)>;
using LargeTable = Whole<kMostParameterBytes>;

__device__ int64_t first_unit() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t stride() { return int64_t{gridDim.x} * blockDim.x; }

template <class Unit>
__device__ Unit* place_of(const Table& table, const Entry& entry, int64_t i) {
  return reinterpret_cast<Unit*>(entry.address) +
         offset_in(table.shapes[entry.shape], i - entry.start);
}

template <class Unit, class Source>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ Source source, Unit* packed) {
  const Table table = source.table();
  for (int64_t i = first_unit(); i < table.total; i += stride()) {
    const Entry& entry = table.entries[find_entry(table, i)];
    packed[i] = *place_of<const Unit>(table, entry, i);
  }
}

template <class Unit, class Source>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ Source source, const Unit* packed) {
  const Table table = source.table();
  for (int64_t i = first_unit(); i < table.total; i += stride()) {
    const Entry& entry = table.entries[find_entry(table, i)];
    *place_of<Unit>(table, entry, i) = packed[i];
  }
}

// kWidth elements that are loaded and stored together.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

template <class T>
__device__ T plus(T a, T b) {
  return a + b;
}
__device__ __half plus(__half a, __half b) { return __hadd(a, b); }
// Adds in float, like PyTorch, because devices before compute capability 8.0 can't add this type.
__device__ __nv_bfloat16 plus(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16(__bfloat162float(a) + __bfloat162float(b));
}

template <class T, int kWidth>
__device__ void add_atomically(Pack<T, kWidth>* to, const Pack<T, kWidth>& from) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) atomicAdd(&to->values[k], from.values[k]);
}

template <>
__device__ void add_atomically(Pack<__half, 8>* to, const Pack<__half, 8>& from) {
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    atomicAdd(reinterpret_cast<__half2*>(&to->values[k]),
              __halves2half2(from.values[k], from.values[k + 1]));
  }
}

template <>
__device__ void add_atomically(Pack<__nv_bfloat16, 8>* to, const Pack<__nv_bfloat16, 8>& from) {
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    atomicAdd(reinterpret_cast<__nv_bfloat162*>(&to->values[k]),
              __halves2bfloat162(from.values[k], from.values[k + 1]));
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <>
__device__ void add_atomically(Pack<float, 4>* to, const Pack<float, 4>& from) {
#if defined(__CUDA_ARCH__)
  atomicAdd(reinterpret_cast<float4*>(to),
            make_float4(from.values[0], from.values[1], from.values[2], from.values[3]));
#endif
}
#endif

template <class T, int kWidth, class Source>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const __grid_constant__ Source source, const Pack<T, kWidth>* values) {
  const Table table = source.table();
  for (int64_t i = first_unit(); i < table.total; i += stride()) {
    const Entry& entry = table.entries[find_entry(table, i)];
    const int64_t from = table.contributions[entry.first] + (i - entry.start);
    add_atomically(place_of<Pack<T, kWidth>>(table, entry, i), values[from]);
  }
}

template <class T, int kWidth, class Source>
__global__ void __launch_bounds__(kThreads)
    add_in_order_kernel(const __grid_constant__ Source source, const Pack<T, kWidth>* values) {
  const Table table = source.table();
  for (int64_t i = first_unit(); i < table.total; i += stride()) {
    const Entry& entry = table.entries[find_entry(table, i)];
    auto* to = place_of<Pack<T, kWidth>>(table, entry, i);
    Pack<T, kWidth> sum = *to;
    for (int32_t c = 0; c < entry.count; ++c) {
      const auto from = values[table.contributions[entry.first + c] + (i - entry.start)];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum.values[k] = plus(sum.values[k], from.values[k]);
    }
    *to = sum;
  }
}

// --- lookups of rows ---

struct RowsPointer {
  const RowEntry* value;
  __device__ const RowEntry* entries() const { return value; }
};
template <int kBytes>
struct WholeRows {
  RowEntry value[kBytes / sizeof(RowEntry)];
  __device__ const RowEntry* entries() const { return value; }
};
using SmallRows = WholeRows<3900>;
using LargeRows = WholeRows<kMostParameterBytes>;

__device__ int64_t row_of_lookup(const RowLayout& layout, const RowEntry& entry, int64_t i) {
  int64_t rest = i - entry.start, row = entry.first;
  int64_t places[kMostLists] = {};
  for (int32_t d = kMostLookupDims - 1; d >= 0; --d) {
    if (entry.sizes[d] == 1) continue;
    const int64_t k = rest % entry.sizes[d];
    rest /= entry.sizes[d];
    row += k * entry.steps[d];
    for (int32_t l = 0; l < layout.lists; ++l) places[l] += k * entry.lists[l].strides[d];
  }
  for (int32_t l = 0; l < layout.lists; ++l) {
    const RowEntry::List& list = entry.lists[l];
    int64_t index = layout.is_int[l] ? reinterpret_cast<const int32_t*>(list.values)[places[l]]
                                     : reinterpret_cast<const int64_t*>(list.values)[places[l]];
    if (layout.from_end && index < 0) index += list.length;
    if (index < 0 || index >= list.length) return kNoRow;
    row += index * list.step;
  }
  return row;
}

template <class Source>
__global__ void __launch_bounds__(kThreads)
    find_rows_kernel(const __grid_constant__ Source source, RowLayout layout, int64_t* rows) {
  const RowEntry* entries = source.entries();
  for (int64_t i = first_unit(); i < layout.total; i += stride()) {
    const RowEntry& entry = entries[find_last(entries, layout.num_entries, i)];
    rows[i] = row_of_lookup(layout, entry, i);
  }
}

// Launches one thread for each unit of the table, up to the maximum number of blocks.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t units, cudaStream_t stream,
           Arguments... arguments) {
#if defined(AUTOBATCH_CUDA_ON_CPU)  // tests/cpp/cuda_on_cpu
  cuda_on_cpu::run(kernel, blocks_for(units), kThreads, stream, arguments...);
#else
  kernel<<<blocks_for(units), kThreads, 0, stream>>>(arguments...);
#endif
  return static_cast<int>(cudaGetLastError());
}

template <class Source, class Run>
int launch_with(const SentTable& table, const Run& run) {
  Source source;
  source.layout = table.layout;
  std::memcpy(source.bytes, table.bytes, static_cast<size_t>(table.layout.num_bytes()));
  return run(source);
}

// Calls run(source) with the table in the form that the kernel takes.
template <class Run>
int with_source(const SentTable& table, const Run& run) {
  if (!table.on_host) return run(Pointer{table.layout.at(table.bytes)});
  const int64_t bytes = table.layout.num_bytes();
  if (bytes > kMostParameterBytes) return static_cast<int>(cudaErrorInvalidValue);
  return bytes <= static_cast<int64_t>(sizeof(SmallTable::bytes))
             ? launch_with<SmallTable>(table, run)
             : launch_with<LargeTable>(table, run);
}

template <class Unit>
int launch_gather(const SentTable& table, void* packed, cudaStream_t stream) {
  return with_source(table, [&](const auto& source) {
    using Source = std::decay_t<decltype(source)>;
    return launch(gather_kernel<Unit, Source>, table.layout.total, stream, source,
                  static_cast<Unit*>(packed));
  });
}

template <class Unit>
int launch_unpack(const SentTable& table, const void* packed, cudaStream_t stream) {
  return with_source(table, [&](const auto& source) {
    using Source = std::decay_t<decltype(source)>;
    return launch(unpack_kernel<Unit, Source>, table.layout.total, stream, source,
                  static_cast<const Unit*>(packed));
  });
}

template <class T, int kWidth>
int launch_add(const SentTable& table, bool in_order, const void* values, cudaStream_t stream) {
  const auto* from = static_cast<const Pack<T, kWidth>*>(values);
  return with_source(table, [&](const auto& source) {
    using Source = std::decay_t<decltype(source)>;
    const auto kernel =
        in_order ? add_in_order_kernel<T, kWidth, Source> : add_kernel<T, kWidth, Source>;
    return launch(kernel, table.layout.total, stream, source, from);
  });
}

template <class T>
int launch_add(const SentTable& table, int width, bool in_order, const void* values,
               cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (width == kWide) return launch_add<T, kWide>(table, in_order, values, stream);
  if (width != 1) return static_cast<int>(cudaErrorInvalidValue);
  return launch_add<T, 1>(table, in_order, values, stream);
}

int add(const SentTable& table, Element element, int width, bool in_order, const void* values,
        cudaStream_t stream) {
  if (table.layout.total == 0) return 0;
  switch (element) {
    case Element::kHalf:
      return launch_add<__half>(table, width, in_order, values, stream);
    case Element::kBFloat16:
      return launch_add<__nv_bfloat16>(table, width, in_order, values, stream);
    case Element::kFloat:
      return launch_add<float>(table, width, in_order, values, stream);
    case Element::kDouble:
      return launch_add<double>(table, width, in_order, values, stream);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

template <class Source>
int launch_rows(const SentRows& rows, int64_t* out, cudaStream_t stream) {
  Source source;
  std::memcpy(source.value, rows.entries, static_cast<size_t>(rows.num_bytes()));
  return launch(find_rows_kernel<Source>, rows.layout.total, stream, source, rows.layout, out);
}

// Calls `launch` with a value of a type that has `unit` bytes. Returns the error code of `launch`.
template <class Launch>
int with_unit(int unit, const Launch& launch) {
  switch (unit) {
    case 16:
      return launch(uint4{});
    case 8:
      return launch(uint2{});
    case 4:
      return launch(uint32_t{});
    case 2:
      return launch(uint16_t{});
    case 1:
      return launch(uint8_t{});
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}

}  // namespace

bool has_kernels() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, gather_kernel<uint4, LargeTable>) == cudaSuccess)
    return true;
  cudaGetLastError();  // clears the error, so that later calls do not report this error
  return false;
}

int gather(const SentTable& table, int unit, void* packed, CUstream_st* stream) {
  if (table.layout.total == 0) return 0;
  return with_unit(unit, [&](auto u) { return launch_gather<decltype(u)>(table, packed, stream); });
}

int unpack(const SentTable& table, int unit, const void* packed, CUstream_st* stream) {
  if (table.layout.total == 0) return 0;
  return with_unit(unit, [&](auto u) { return launch_unpack<decltype(u)>(table, packed, stream); });
}

int scatter_add(const SentTable& table, Element element, int width, const void* values,
                CUstream_st* stream) {
  return add(table, element, width, /*in_order=*/false, values, stream);
}

int scatter_add_in_order(const SentTable& table, Element element, int width, const void* values,
                         CUstream_st* stream) {
  return add(table, element, width, /*in_order=*/true, values, stream);
}

int find_rows(const SentRows& rows, int64_t* out, CUstream_st* stream) {
  if (rows.layout.total == 0) return 0;
  if (!rows.on_host) {
    return launch(find_rows_kernel<RowsPointer>, rows.layout.total, stream,
                  RowsPointer{rows.entries}, rows.layout, out);
  }
  if (rows.num_bytes() <= static_cast<int64_t>(sizeof(SmallRows))) {
    return launch_rows<SmallRows>(rows, out, stream);
  }
  if (rows.num_bytes() > static_cast<int64_t>(sizeof(LargeRows))) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  return launch_rows<LargeRows>(rows, out, stream);
}

}  // namespace autobatch::cuda

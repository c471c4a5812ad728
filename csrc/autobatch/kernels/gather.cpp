#include "autobatch/kernels/gather.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/common/prefetch.h"
#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/kernels/gather_device.h"
#include "autobatch/kernels/strided_copy.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace autobatch {
namespace {

// For fewer bytes than this, a second thread costs more time than it saves.
constexpr int64_t kGrainBytes = 1 << 17;

char* mutable_address(const Region& region) {
  return static_cast<char*>(region.buffer->mutable_data_ptr()) +
         region.offset * static_cast<int64_t>(region.buffer->element_size());
}

// Describes a strided region as an outer loop over contiguous runs.
struct Runs {
  int64_t length = 1;  // number of elements in a run
  c10::SmallVector<int64_t, 6> sizes;
  c10::SmallVector<int64_t, 6> strides;
};

Runs runs_of(const Geometry& g) {
  Runs runs;
  int64_t d = g.dim() - 1;
  for (; d >= 0; --d) {
    if (g.sizes[d] != 1 && g.strides[d] != runs.length) break;
    runs.length *= g.sizes[d];
  }
  for (int64_t outer = 0; outer <= d; ++outer) {
    runs.sizes.push_back(g.sizes[outer]);
    runs.strides.push_back(g.strides[outer]);
  }
  return runs;
}

// Calls visit(offset of the run in the region) for each run, in row-major order.
template <class Visit>
void for_each_run(const Runs& runs, const Visit& visit) {
  c10::SmallVector<int64_t, 6> index(runs.sizes.size(), 0);
  int64_t offset = 0;
  while (true) {
    visit(offset);
    size_t d = runs.sizes.size();
    while (d > 0) {
      --d;
      offset += runs.strides[d];
      if (++index[d] < runs.sizes[d]) break;
      offset -= runs.strides[d] * runs.sizes[d];
      index[d] = 0;
      if (d == 0) return;
    }
    if (runs.sizes.empty()) return;
  }
}

void copy_region(const Region& region, char* out, int64_t item) {
  const Geometry& g = *region.geometry;
  if (g.numel == 0) return;
  const char* from = region.address();
  if (g.contiguous) {
    std::memcpy(out, from, static_cast<size_t>(g.numel * item));
    return;
  }
  const Runs runs = runs_of(g);
  if (runs.length == 1) return copy_strided(from, g, out, item);
  for_each_run(runs, [&](int64_t offset) {
    std::memcpy(out, from + offset * item, static_cast<size_t>(runs.length * item));
    out += runs.length * item;
  });
}

void gather_cpu(const Regions& regions, const at::Tensor& out) {
  const auto item = static_cast<int64_t>(out.element_size());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const auto n = static_cast<int64_t>(regions.size());
  const int64_t total = out.numel() * item;
  if (total < 2 * kGrainBytes || at::get_num_threads() == 1) {
    for (const Region& region : regions) {
      copy_region(region, to, item);
      to += region.geometry->numel * item;
    }
    return;
  }
  std::vector<int64_t> starts(regions.size());
  int64_t start = 0;
  for (size_t m = 0; m < regions.size(); ++m) {
    starts[m] = start;
    start += regions[m].geometry->numel * item;
  }
  const int64_t grain = std::max<int64_t>(1, n * kGrainBytes / total);
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) copy_region(regions[m], to + starts[m], item);
  });
}

template <class T>
void add_run(T* to, const T* from, int64_t length) {
  for (int64_t i = 0; i < length; ++i) to[i] += from[i];
}

// Writes 0 + the first contribution to a run. The result is the same as after adding the
// contribution to zeros.
template <class T>
void start_run(T* to, const T* from, int64_t length) {
  for (int64_t i = 0; i < length; ++i) to[i] = T(0) + from[i];
}

// An output with more bytes than this does not fit into the caches. Zeros are then written without
// fetching the cache lines of the output.
constexpr size_t kFarBytes = size_t{1} << 24;

// Writes zeros to memory that is not read soon. Stores of whole vectors bypass the caches.
void clear_far(char* to, size_t bytes) {
#if defined(__SSE2__)
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % sizeof(__m128i));
  std::memset(to, 0, head);
  to += head, bytes -= head;
  for (; bytes >= sizeof(__m128i); to += sizeof(__m128i), bytes -= sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_setzero_si128());
  }
  _mm_sfence();
#endif
  std::memset(to, 0, bytes);
}

// Writes zeros to the rows that have received no addition (`begun` is 0). Consecutive rows are
// filled together.
void clear_rows(char* rows, size_t bytes, const std::vector<uint8_t>& begun) {
  const bool far = bytes * begun.size() > kFarBytes;
  const auto row_bytes = std::max<int64_t>(1, static_cast<int64_t>(bytes));
  const auto count = static_cast<int64_t>(begun.size());
  at::parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / row_bytes),
                   [&](int64_t first, int64_t last) {
                     const auto end = begun.begin() + last;
                     for (auto row = begun.begin() + first; row != end;) {
                       const auto from = std::find(row, end, 0);
                       row = std::find_if(from, end, [](uint8_t b) { return b != 0; });
                       const auto length = static_cast<size_t>(row - from) * bytes;
                       char* to = rows + (from - begun.begin()) * row_bytes;
                       far ? clear_far(to, length) : void(std::memset(to, 0, length));
                     }
                   });
}

template <class T>
const T* add_region(const T* from, const Region& region) {
  const Geometry& g = *region.geometry;
  if (g.numel == 0 || region.buffer == nullptr) return from + g.numel;
  T* to = reinterpret_cast<T*>(mutable_address(region));
  if (region.fresh) {
    std::memcpy(to, from, static_cast<size_t>(g.numel) * sizeof(T));
    return from + g.numel;
  }
  if (g.contiguous) {
    add_run(to, from, g.numel);
    return from + g.numel;
  }
  const Runs runs = runs_of(g);
  for_each_run(runs, [&](int64_t offset) {
    add_run(to + offset, from, runs.length);
    from += runs.length;
  });
  return from;
}

// Copies `from` to `to`. Either region may be strided. If both regions are strided, the elements
// are first copied to a contiguous buffer.
void copy_between(const Region& from, const Region& to, int64_t item) {
  if (from.geometry->numel == 0) return;
  if (to.geometry->contiguous) return copy_region(from, mutable_address(to), item);
  std::vector<char> buffer;
  const char* source = from.address();
  if (!from.geometry->contiguous) {
    buffer.resize(static_cast<size_t>(from.geometry->numel * item));
    copy_region(from, buffer.data(), item);
    source = buffer.data();
  }
  char* target = mutable_address(to);
  const Runs runs = runs_of(*to.geometry);
  for_each_run(runs, [&](int64_t offset) {
    std::memcpy(target + offset * item, source, static_cast<size_t>(runs.length * item));
    source += runs.length * item;
  });
}

template <class T>
void add_between(const Region& from, const Region& to) {
  if (from.geometry->numel == 0) return;
  if (from.geometry->contiguous) {
    add_region(reinterpret_cast<const T*>(from.address()), to);
    return;
  }
  std::vector<T> buffer(static_cast<size_t>(from.geometry->numel));
  copy_region(from, reinterpret_cast<char*>(buffer.data()), sizeof(T));
  add_region(static_cast<const T*>(buffer.data()), to);
}

#define DISPATCH_FLOATING(TYPE, NAME, ...)                                       \
  AT_DISPATCH_V2(TYPE, NAME, AT_WRAP(__VA_ARGS__), AT_EXPAND(AT_FLOATING_TYPES), \
                 AT_EXPAND(AT_COMPLEX_TYPES), at::kHalf, at::kBFloat16)

}  // namespace

Layout layout_of(const Regions& regions) {
  Layout layout;
  const Region& first = regions.front();
  int64_t expected = first.offset;
  const size_t n = regions.size();
  if (n > 1) layout.step = regions[1].offset - first.offset;
  for (size_t m = 0; m < n; ++m) {
    const Region& r = regions[m];
    const bool same_buffer = r.buffer == first.buffer;
    layout.same_buffer &= same_buffer;
    layout.uniform &= r.geometry == first.geometry;
    layout.same &= r.offset == first.offset;
    layout.regular &= r.offset == first.offset + static_cast<int64_t>(m) * layout.step;
    layout.consecutive &= r.offset == expected && r.geometry->contiguous;
    expected = r.offset + r.geometry->numel;
    layout.numel += r.geometry->numel;
  }
  // Empty regions are not treated as the same region, even if they have the same address.
  layout.same &= layout.same_buffer && layout.uniform && (n == 1 || first.geometry->numel > 0);
  layout.regular &= layout.same_buffer && layout.uniform && layout.step >= 0;
  layout.consecutive &= layout.same_buffer;
  return layout;
}

RegionRows::RegionRows(const Region& first, int64_t count, int64_t step)
    : regions_{first}, count_(count) {
  const Geometry& g = *first.geometry;
  layout_.step = count > 1 ? step : 0;
  layout_.numel = count * g.numel;
  layout_.same = count == 1 || (step == 0 && g.numel > 0);
  layout_.consecutive = g.contiguous && (count == 1 || step == g.numel);
}

const Regions& RegionRows::all() const {
  while (static_cast<int64_t>(regions_.size()) < count_) {
    regions_.push_back(regions_.back());
    regions_.back().offset += layout_.step;
  }
  return regions_;
}

at::Tensor region_view(const Region& region) {
  return strided_view(*region.buffer, region.geometry->sizes, region.geometry->strides,
                      region.offset);
}

at::Tensor regular_view(const RegionRows& located) {
  const Region& first = located.first();
  const Geometry& g = *first.geometry;
  at::DimVector strides{located.layout().step};
  strides.append(g.strides.begin(), g.strides.end());
  return strided_view(*first.buffer, stacked_sizes(located.count(), g.sizes), strides,
                      first.offset);
}

at::Tensor consecutive_view(const RegionRows& located) {
  const Region& first = located.first();
  return strided_view(*first.buffer, {located.layout().numel}, {1}, first.offset);
}

at::Tensor consecutive_rows(const RegionRows& located, int64_t width) {
  const Region& first = located.first();
  return rows_view(*first.buffer, located.layout().numel, width, first.offset);
}

at::Tensor gathered_copy(const RegionRows& located) {
  at::Tensor out = pooled_empty(located.layout().numel, located.first().buffer->options());
  gather_into(located.all(), out);
  return out;
}

at::Tensor flat_of(const RegionRows& located) {
  return located.layout().consecutive ? consecutive_view(located) : gathered_copy(located);
}

at::Tensor stacked_of(const RegionRows& located) {
  if (located.layout().regular) return regular_view(located);
  const at::DimVector sizes = stacked_sizes(located.count(), located.first().geometry->sizes);
  return dense_view(flat_of(located), sizes, 0);
}

void gather_into(const Regions& regions, const at::Tensor& out) {
  const ProfilerRange range("torch_autobatch::gather");
  has_host_memory(out.device()) ? gather_cpu(regions, out) : gather_on_device(regions, out);
}

namespace {

// Whether elements of the region are sums of very many values. If these values are added one after
// the other, the rounding error is clearly larger than the error of ATen's sum.
bool sums_many(const Region& region, c10::ScalarType dtype) {
  if (region.buffer == nullptr || !region.geometry->overlapping) return false;
  return c10::isReducedFloatingType(dtype) ||
         region.geometry->numel >= 32 * region.geometry->extent;
}

void scatter_one_by_one(const at::Tensor& values, const Regions& regions) {
  DISPATCH_FLOATING(values.scalar_type(), "autobatch_scatter_add", [&] {
    const scalar_t* from = values.const_data_ptr<scalar_t>();
    for (const Region& region : regions) from = add_region(from, region);
  });
}

void add_sum(const at::Tensor& values, const Region& region) {
  const Geometry& g = *region.geometry;
  at::DimVector sizes(g.sizes.begin(), g.sizes.end());
  at::DimVector repeated;
  for (int64_t d = 0; d < g.dim(); ++d) {
    if (g.strides[d] != 0 || g.sizes[d] == 1) continue;
    repeated.push_back(d);
    sizes[d] = 1;
  }
  at::Tensor sum = values.view(g.sizes);
  if (!repeated.empty()) sum = sum.sum(repeated, /*keepdim=*/true);
  GeometryTable geometries;
  const Geometry* reduced = geometries.intern(sizes, g.strides);
  const Region to{region.buffer, region.offset, reduced};
  reduced->overlapping ? scatter_one_by_one(plain(sum), {to}) : (void)region_view(to).add_(sum);
}

}  // namespace

void scatter_add(const at::Tensor& values, const Regions& regions) {
  const ProfilerRange range("torch_autobatch::scatter");
  if (!has_host_memory(values.device())) return scatter_add_on_device(values, regions);
  const auto many = [&](const Region& r) { return sums_many(r, values.scalar_type()); };
  if (std::none_of(regions.begin(), regions.end(), many)) {
    return scatter_one_by_one(values, regions);
  }
  int64_t start = 0;
  for (const Region& region : regions) {
    const at::Tensor part = values.view({-1}).narrow(0, start, region.geometry->numel);
    start += region.geometry->numel;
    many(region) ? add_sum(part, region) : scatter_add(part, {region});
  }
}

at::Tensor plain(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options());
  if (tensor.layout() != c10::kStrided) return tensor.to_dense().contiguous();
  return tensor.resolve_conj().resolve_neg().contiguous();
}

void copy_regions(const Regions& from, const Regions& to) {
  if (from.empty()) return;
  if (!has_host_memory(from[0].buffer->device())) return copy_regions_on_device(from, to);
  const auto item = static_cast<int64_t>(from[0].buffer->element_size());
  for (size_t i = 0; i < from.size(); ++i) copy_between(from[i], to[i], item);
}

void add_regions(const Regions& from, const Regions& to) {
  const ProfilerRange range("torch_autobatch::scatter");
  if (from.empty()) return;
  if (!has_host_memory(from[0].buffer->device())) return add_regions_on_device(from, to);
  DISPATCH_FLOATING(from[0].buffer->scalar_type(), "autobatch_add_regions", [&] {
    for (size_t i = 0; i < from.size(); ++i) add_between<scalar_t>(from[i], to[i]);
  });
}

void index_add_rows(const at::Tensor& target, const at::Tensor& indices, const at::Tensor& rows,
                    int64_t skip, at::IntArrayRef times, bool fresh) {
  const auto blocks = static_cast<int64_t>(times.size());
  const int64_t block = times.empty() ? rows.size(0) : rows.size(0) / blocks;
  if (!has_host_memory(target.device())) {
    if (fresh) target.zero_();
    if (!times.empty()) {
      const at::Tensor each = repeat_rows(rows.reshape({blocks, -1}), times.vec());
      return index_add_rows(target, indices, each.view({-1, target.size(1)}), skip);
    }
    target.index_add_(0, indices,
                      skip < 0 ? rows : rows.masked_fill(indices.eq(skip).unsqueeze(1), 0));
    return;
  }
  const at::Tensor from = rows.contiguous();
  const at::Tensor where = indices.to(at::kLong).contiguous();
  const int64_t width = target.size(1);
  DISPATCH_FLOATING(target.scalar_type(), "autobatch_index_add_rows", [&] {
    const scalar_t* row = from.const_data_ptr<scalar_t>();
    scalar_t* to = target.mutable_data_ptr<scalar_t>();
    const int64_t* index = where.const_data_ptr<int64_t>();
    const int64_t* end = index + where.numel();
    const auto bytes = static_cast<size_t>(width) * sizeof(scalar_t);
    std::vector<uint8_t> begun(fresh ? static_cast<size_t>(target.size(0)) : 0);
    const auto add_block = [&] {
      for (int64_t r = 0; r < block; ++r, ++index) {
        const int64_t* ahead = index + kRowsAhead;
        if (ahead < end && *ahead != skip) prefetch_row(to + *ahead * width, bytes);
        if (*index == skip) continue;
        const bool adds = !fresh || std::exchange(begun[static_cast<size_t>(*index)], 1) != 0;
        (adds ? add_run<scalar_t> : start_run<scalar_t>)(to + *index * width, row + r * width,
                                                         width);
      }
    };
    if (times.empty()) add_block();
    for (int64_t n : times) {
      for (int64_t i = 0; i < n; ++i) add_block();
      row += block * width;
    }
    if (fresh) clear_rows(reinterpret_cast<char*>(to), bytes, begun);
  });
}

}  // namespace autobatch

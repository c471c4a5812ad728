#include "autobatch/kernels/segment_reduce.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/common/prefetch.h"
#include "autobatch/kernels/to_device.h"

#include <ATen/ATen.h>
#include <ATen/AccumulateType.h>
#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>

namespace autobatch {
namespace {

using at::Tensor;

// Maximum number of rows that are summed one after the other.
constexpr int64_t kPlainRows = 16;
// For fewer elements than this, a second thread costs more time than it saves.
constexpr int64_t kGrain = 1 << 15;

#define DISPATCH_ANY(TYPE, NAME, ...)                                       \
  AT_DISPATCH_V2(TYPE, NAME, AT_WRAP(__VA_ARGS__), AT_EXPAND(AT_ALL_TYPES), \
                 AT_EXPAND(AT_COMPLEX_TYPES), at::kBool, at::kHalf, at::kBFloat16)
#define DISPATCH_REAL(TYPE, NAME, ...)                                                 \
  AT_DISPATCH_V2(TYPE, NAME, AT_WRAP(__VA_ARGS__), AT_EXPAND(AT_ALL_TYPES), at::kHalf, \
                 at::kBFloat16)
#define DISPATCH_FLOATING(TYPE, NAME, ...)                                       \
  AT_DISPATCH_V2(TYPE, NAME, AT_WRAP(__VA_ARGS__), AT_EXPAND(AT_FLOATING_TYPES), \
                 AT_EXPAND(AT_COMPLEX_TYPES), at::kHalf, at::kBFloat16)

// Calls visit(s, first row of s) for each segment, on several threads if there are many elements.
template <class Visit>
void for_each_segment(const Counts& counts, int64_t inner, const Visit& visit) {
  const auto segments = static_cast<int64_t>(counts.size());
  std::vector<int64_t> starts(counts.size() + 1, 0);
  for (int64_t s = 0; s < segments; ++s) starts[s + 1] = starts[s] + counts[s];
  const int64_t total = std::max<int64_t>(1, starts[segments] * inner);
  const int64_t grain = std::max<int64_t>(1, segments * kGrain / total);
  at::parallel_for(0, segments, grain, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) visit(s, starts[s]);
  });
}

// For devices other than the CPU: calls visit(rows of the segment, s) for one segment after the
// other.
template <class Visit>
void on_each_segment(const Tensor& rows, const Counts& counts, const Visit& visit) {
  int64_t start = 0;
  for (size_t s = 0; s < counts.size(); ++s) {
    visit(rows.narrow(0, start, counts[s]), static_cast<int64_t>(s));
    start += counts[s];
  }
}

// Computes `sum`, the sum of n rows, from row `first` on. row(r) points to row r. `scratch` has
// room for num_halvings(n) rows.
template <class Row, class A>
void sum_pairwise(const Row& row, int64_t first, int64_t n, int64_t inner, A* sum, A* scratch) {
  if (n <= kPlainRows) {
    std::fill(sum, sum + inner, A(0));
    for (int64_t r = first; r < first + n; ++r) {
      const auto* from = row(r);
      for (int64_t i = 0; i < inner; ++i) sum[i] += static_cast<A>(from[i]);
    }
    return;
  }
  const int64_t half = n / 2;
  sum_pairwise(row, first, half, inner, sum, scratch);
  sum_pairwise(row, first + half, n - half, inner, scratch, scratch + inner);
  for (int64_t i = 0; i < inner; ++i) sum[i] += scratch[i];
}

// Returns the sum of n consecutive elements. Several sums are computed side by side, because in a
// single sum each addition would wait for the previous addition.
template <class A, class T>
A sum_elements(const T* x, int64_t n) {
  constexpr int64_t kLanes = 16, kBlock = 256;
  if (n > kBlock) return sum_elements<A>(x, n / 2) + sum_elements<A>(x + n / 2, n - n / 2);
  A sum(0);
  int64_t i = 0;
  if (n >= kLanes) {
    std::array<A, kLanes> lanes{};
    for (; i + kLanes <= n; i += kLanes) {
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<A>(x[i + k]);
    }
    for (const A lane : lanes) sum += lane;
  }
  for (; i < n; ++i) sum += static_cast<A>(x[i]);
  return sum;
}

int64_t num_halvings(int64_t n) {
  int64_t halvings = 0;
  for (; n > kPlainRows; n = n - n / 2) ++halvings;
  return halvings;
}

// Computes the sum of n rows, from row `first` on, and writes it to out[0, inner).
template <class A, class Row, class T>
void sum_rows(const Row& row, int64_t first, int64_t n, int64_t inner, T* out) {
  if (inner <= 0) return;
  if constexpr (std::is_same_v<A, T>) {
    if (n <= kPlainRows) return sum_pairwise(row, first, n, inner, out, out);
  }
  std::vector<A> sum(static_cast<size_t>(inner * (1 + num_halvings(n))));
  sum_pairwise(row, first, n, inner, sum.data(), sum.data() + inner);
  std::copy_n(sum.data(), inner, out);
}

bool all_equal(const Counts& counts, int64_t value) {
  return std::all_of(counts.begin(), counts.end(), [&](int64_t c) { return c == value; });
}

// --- for devices where a call is expensive: a few calls for all segments ---

// Returns, for each row, the index of its segment.
Tensor segment_numbers(const Counts& counts) {
  int64_t total = 0;
  for (int64_t c : counts) total += c;
  Tensor numbers = at::empty({total}, at::kLong);
  auto* to = numbers.mutable_data_ptr<int64_t>();
  for (size_t s = 0; s < counts.size(); ++s) to = std::fill_n(to, counts[s], int64_t(s));
  return numbers;
}

void sum_on_device(const Tensor& rows, const Counts& counts, Tensor& out) {
  if (counts.empty() || out.numel() == 0) return;
  if (all_equal(counts, counts.front()) && counts.front() != 0) {
    const auto n = static_cast<int64_t>(counts.size());
    out.copy_(rows.reshape({n, counts.front(), rows.size(1)}).sum(1));
    return;
  }
  const c10::ScalarType exact = at::toOpMathType(out.scalar_type());
  const Tensor numbers = to_device(segment_numbers(counts), rows.device());
  Tensor sums = exact == out.scalar_type() ? out.zero_() : at::zeros_like(out, exact);
  sums.index_add_(0, numbers, rows.to(exact));
  if (exact != out.scalar_type()) out.copy_(sums);
}

// Reduces all segments together, as blocks of equal length. Short segments are padded with copies
// of their first row. The copies do not change the values or the indices.
void extreme_on_device(const Tensor& rows, const Counts& counts, bool largest, Tensor& values,
                       Tensor& indices) {
  const auto n = static_cast<int64_t>(counts.size());
  if (n == 0 || rows.size(1) == 0) return;
  const auto [shortest, longest] = std::ranges::minmax(counts);
  TORCH_INTERNAL_ASSERT(shortest > 0, "a segment without rows has no maximum or minimum");
  std::vector<int64_t> places;
  int64_t start = 0;
  for (int64_t count : counts) {
    for (int64_t i = 0; i < longest; ++i) places.push_back(start + (i < count ? i : 0));
    start += count;
  }
  const Tensor filled = shortest == longest
                            ? rows
                            : rows.index_select(0, to_device(at::tensor(places), rows.device()));
  const Tensor blocks = filled.reshape({n, longest, rows.size(1)});
  const auto [value, index] = largest ? blocks.max(1) : blocks.min(1);
  values.copy_(value);
  if (filled.is_same(rows)) return void(indices.copy_(index));
  const Tensor lengths = to_device(at::tensor(counts), rows.device()).unsqueeze(1);
  indices.copy_(index.masked_fill(index.ge(lengths), 0));
}

}  // namespace

void segment_sum(const Tensor& rows, const Counts& counts, Tensor& out) {
  const int64_t inner = rows.size(1);
  const bool counted = c10::isIntegralType(rows.scalar_type(), true);
  if (!has_host_memory(rows.device())) {
    return sum_on_device(rows, counts, out);
  }
  const Tensor from = rows.contiguous();
  DISPATCH_ANY(rows.scalar_type(), "autobatch_segment_sum", [&] {
    using exact_t = std::conditional_t<std::is_integral_v<scalar_t>, int64_t, scalar_t>;
    using acc_t = at::opmath_type<exact_t>;
    const scalar_t* rows_at = from.const_data_ptr<scalar_t>();
    auto* to = static_cast<exact_t*>(out.mutable_data_ptr());
    TORCH_INTERNAL_ASSERT(!counted || out.scalar_type() == at::kLong);
    const int64_t step = out.stride(0);
    const auto row = [&](int64_t r) { return rows_at + r * inner; };
    for_each_segment(counts, inner, [&](int64_t s, int64_t start) {
      if (inner == 1) {
        to[s * step] = static_cast<exact_t>(sum_elements<acc_t>(row(start), counts[s]));
      } else {
        sum_rows<acc_t>(row, start, counts[s], inner, to + s * step);
      }
    });
  });
}

void segment_sum_of(const Tensor& matrix, const Tensor& indices, const Counts& counts, int64_t rows,
                    Tensor& out) {
  const int64_t width = matrix.size(1);
  if (!has_host_memory(matrix.device())) {
    Tensor blocks = out.view({out.size(0) / rows, rows * width});
    const Tensor found = matrix.index_select(0, indices);
    return segment_sum(found.view({-1, rows * width}), counts, blocks);
  }
  const Tensor from = matrix.contiguous();
  const Tensor where = indices.to(at::kLong);
  const int64_t* index = where.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < where.numel(); ++i) {
    TORCH_CHECK_INDEX(index[i] >= 0 && index[i] < from.size(0), "index out of range in self");
  }
  DISPATCH_FLOATING(matrix.scalar_type(), "autobatch_segment_sum_of", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const scalar_t* first = from.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const auto bytes = static_cast<size_t>(width) * sizeof(scalar_t);
    for_each_segment(counts, rows * width, [&](int64_t s, int64_t start) {
      for (int64_t r = 0; r < rows; ++r) {
        const auto row = [&](int64_t t) {
          const int64_t ahead = (t + kRowsAhead) * rows + r;
          if (ahead < where.numel()) prefetch_row(first + index[ahead] * width, bytes);
          return first + index[t * rows + r] * width;
        };
        sum_rows<acc_t>(row, start, counts[s], width, to + (s * rows + r) * width);
      }
    });
  });
}

namespace {

// Repeats the rows. A row has the size of T.
template <class T>
void fill_segments(const Tensor& rows, const Counts& counts, const Tensor& out) {
  const auto* row = static_cast<const T*>(rows.const_data_ptr());
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  for_each_segment(counts, 1, [&](int64_t s, int64_t start) {
    std::fill_n(to + start, counts[static_cast<size_t>(s)], row[s]);
  });
}

// Repeats rows of any size.
void copy_into_segments(const Tensor& rows, const Counts& counts, const Tensor& out) {
  const auto bytes = static_cast<int64_t>(rows.element_size()) * rows.size(1);
  const char* row = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for_each_segment(counts, rows.size(1), [&](int64_t s, int64_t start) {
    for (int64_t r = 0; r < counts[static_cast<size_t>(s)]; ++r) {
      std::memcpy(to + (start + r) * bytes, row + s * bytes, static_cast<size_t>(bytes));
    }
  });
}

}  // namespace

Tensor repeat_rows(const Tensor& rows, const Counts& counts) {
  if (all_equal(counts, 1)) return rows;
  if (!has_host_memory(rows.device())) {
    return rows.index_select(0, to_device(segment_numbers(counts), rows.device()));
  }
  int64_t total = 0;
  for (int64_t c : counts) total += c;
  const Tensor from = rows.contiguous();
  const Tensor out = pooled_empty({total, rows.size(1)}, rows.options());
  switch (static_cast<int64_t>(rows.element_size()) * rows.size(1)) {
    case 2:
      fill_segments<uint16_t>(from, counts, out);
      break;
    case 4:
      fill_segments<uint32_t>(from, counts, out);
      break;
    case 8:
      fill_segments<uint64_t>(from, counts, out);
      break;
    default:
      copy_into_segments(from, counts, out);
  }
  return out;
}

namespace {

// Returns the index of the extreme in a segment whose rows have one element each. This is the index
// of the first NaN, or, without NaNs, of the first largest (or smallest) element. Compares several
// elements at a time, because in a single chain each comparison would wait for the previous
// comparison.
template <bool kLargest, class T>
int64_t find_extreme(const T* x, int64_t count) {
  constexpr int64_t kLanes = 16;
  if (count < kLanes) {  // one chain is faster for few elements
    int64_t best = 0;
    for (int64_t i = 1; i < count; ++i) {
      const bool is_better = kLargest ? !(x[i] <= x[best]) : !(x[i] >= x[best]);
      if (is_better && x[best] == x[best]) best = i;  // keeps the first NaN
    }
    return best;
  }
  const auto better = [](T a, T b) { return kLargest ? std::max(a, b) : std::min(a, b); };
  std::array<T, kLanes> lanes;
  lanes.fill(x[0]);
  bool has_nan = false;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    int nan = 0;
    for (int64_t k = 0; k < kLanes; ++k) {
      lanes[k] = better(lanes[k], x[i + k]);
      nan |= static_cast<int>(x[i + k] != x[i + k]);
    }
    has_nan |= nan != 0;
  }
  for (; i < count; ++i) {
    lanes[0] = better(lanes[0], x[i]);
    has_nan |= x[i] != x[i];
  }
  if (has_nan) return std::find_if(x, x + count, [](T each) { return each != each; }) - x;
  T best = lanes[0];
  for (const T lane : lanes) best = better(best, lane);
  return std::find(x, x + count, best) - x;
}

}  // namespace

void segment_extreme(const Tensor& rows, const Counts& counts, bool largest, Tensor& values,
                     Tensor& indices) {
  const int64_t inner = rows.size(1);
  if (!has_host_memory(rows.device())) {
    return extreme_on_device(rows, counts, largest, values, indices);
  }
  const Tensor from = rows.contiguous();
  DISPATCH_REAL(rows.scalar_type(), "autobatch_segment_extreme", [&] {
    const scalar_t* row = from.const_data_ptr<scalar_t>();
    scalar_t* value = values.mutable_data_ptr<scalar_t>();
    int64_t* index = indices.mutable_data_ptr<int64_t>();
    for_each_segment(counts, inner, [&](int64_t s, int64_t start) {
      scalar_t* best = value + s * inner;
      int64_t* where = index + s * inner;
      std::fill_n(where, inner, 0);
      if (counts[s] == 0) {
        using limits = std::numeric_limits<scalar_t>;
        std::fill_n(best, inner, largest ? limits::lowest() : limits::max());
        return;
      }
      if (inner == 1) {
        const scalar_t* x = row + start;
        *where = largest ? find_extreme<true>(x, counts[s]) : find_extreme<false>(x, counts[s]);
        *best = x[*where];
        return;
      }
      std::copy_n(row + start * inner, inner, best);
      for (int64_t r = 1; r < counts[s]; ++r) {
        const scalar_t* x = row + (start + r) * inner;
        for (int64_t i = 0; i < inner; ++i) {
          const bool better = largest ? !(x[i] <= best[i]) : !(x[i] >= best[i]);
          const bool settled = best[i] != best[i];  // keeps the first NaN
          best[i] = better && !settled ? x[i] : best[i];
          where[i] = better && !settled ? r : where[i];
        }
      }
    });
  });
}

Tensor scatter_to_rows(const Tensor& values, const Tensor& indices, const Counts& counts) {
  Counts starts;
  int64_t total = 0;
  for (int64_t c : counts) starts.push_back(total), total += c;
  const Tensor first = to_device(at::tensor(starts, at::kLong), values.device()).unsqueeze(1);
  return at::zeros({total, values.size(1)}, values.options()).scatter_(0, indices + first, values);
}

void segment_cumsum(const Tensor& rows, const Counts& counts, bool reverse, Tensor& out) {
  const int64_t inner = rows.size(1);
  if (!has_host_memory(rows.device())) {
    int64_t start = 0;
    on_each_segment(rows, counts, [&](const Tensor& part, int64_t s) {
      const Tensor sums = reverse ? part.flip(0).cumsum(0).flip(0) : part.cumsum(0);
      out.narrow(0, start, counts[s]).copy_(sums);
      start += counts[s];
    });
    return;
  }
  const Tensor from = rows.contiguous();
  DISPATCH_FLOATING(rows.scalar_type(), "autobatch_segment_cumsum", [&] {
    using acc_t = at::acc_type<scalar_t, /*is_cuda=*/false>;  // the type that ATen's kernel uses
    const scalar_t* row = from.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_segment(counts, inner, [&](int64_t s, int64_t start) {
      std::vector<acc_t> sum(static_cast<size_t>(inner), acc_t(0));
      for (int64_t n = 0; n < counts[s]; ++n) {
        const int64_t at = (start + (reverse ? counts[s] - 1 - n : n)) * inner;
        for (int64_t i = 0; i < inner; ++i) {
          sum[i] += static_cast<acc_t>(row[at + i]);
          to[at + i] = static_cast<scalar_t>(sum[i]);
        }
      }
    });
  });
}

void segment_prod(const Tensor& rows, const Counts& counts, Tensor& out) {
  const int64_t inner = rows.size(1);
  if (!has_host_memory(rows.device())) {
    on_each_segment(rows, counts,
                    [&](const Tensor& part, int64_t s) { out[s].copy_(part.prod(0)); });
    return;
  }
  const Tensor from = rows.contiguous();
  DISPATCH_FLOATING(rows.scalar_type(), "autobatch_segment_prod", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const scalar_t* row = from.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_segment(counts, inner, [&](int64_t s, int64_t start) {
      std::vector<acc_t> product(static_cast<size_t>(inner), acc_t(1));
      for (int64_t r = 0; r < counts[s]; ++r) {
        const scalar_t* x = row + (start + r) * inner;
        for (int64_t i = 0; i < inner; ++i) product[i] *= static_cast<acc_t>(x[i]);
      }
      for (int64_t i = 0; i < inner; ++i) to[s * inner + i] = static_cast<scalar_t>(product[i]);
    });
  });
}

namespace {

template <class T>
int64_t count_zeros(const T* from, int64_t n) {
  return std::count_if(from, from + n, [](T x) { return x == T(0); });
}

// For one column of a segment (`n` elements, `step` apart), divides the product of all elements by
// each element.
template <class T>
void divided(const T* x, T* to, int64_t n, int64_t step) {
  using acc_t = at::opmath_type<T>;
  acc_t product = 1;
  for (int64_t r = 0; r < n; ++r) product *= static_cast<acc_t>(x[r * step]);
  const auto rounded = static_cast<acc_t>(static_cast<T>(product));
  for (int64_t r = 0; r < n; ++r) {
    to[r * step] = static_cast<T>(rounded / static_cast<acc_t>(x[r * step]));
  }
}

// For each element, computes the product of the other elements of its column.
template <class T>
void of_others(const T* x, T* to, int64_t n, int64_t step) {
  using acc_t = at::opmath_type<T>;
  acc_t before = 1, after = 1;
  for (int64_t r = 0; r < n; ++r) {
    to[r * step] = static_cast<T>(before);
    before *= static_cast<acc_t>(x[r * step]);
  }
  for (int64_t r = n - 1; r >= 0; --r) {
    to[r * step] = static_cast<T>(static_cast<acc_t>(to[r * step]) * after);
    after *= static_cast<acc_t>(x[r * step]);
  }
}

}  // namespace

Tensor product_gradient(const Tensor& rows, const Counts& counts, const Counts& segments,
                        bool whole) {
  const Tensor from = rows.cpu().contiguous();
  const Tensor out = at::zeros(from.sizes(), from.options());
  const int64_t inner = rows.size(1);
  DISPATCH_FLOATING(rows.scalar_type(), "autobatch_product_gradient", [&] {
    const scalar_t* x = from.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    size_t s = 0;
    for (int64_t of_instance : segments) {
      const size_t end = s + static_cast<size_t>(of_instance);
      const int64_t length = std::accumulate(counts.begin() + s, counts.begin() + end, int64_t{0});
      const int64_t zeros = count_zeros(x, length * inner);
      for (; s < end; x += counts[s] * inner, to += counts[s] * inner, ++s) {
        if (whole && zeros > 1) continue;
        for (int64_t i = 0; i < inner; ++i) {
          zeros == 0 ? divided(x + i, to + i, counts[s], inner)
                     : of_others(x + i, to + i, counts[s], inner);
        }
      }
    }
  });
  return out.to(rows.device());
}

Tensor reversed_rows(const Tensor& rows, const Counts& counts) {
  const Tensor order = at::empty({rows.size(0)}, at::kLong);
  int64_t* at = order.mutable_data_ptr<int64_t>();
  int64_t start = 0;
  for (int64_t c : counts) {
    for (int64_t r = 0; r < c; ++r) *at++ = start + c - 1 - r;
    start += c;
  }
  return rows.index_select(0, to_device(order, rows.device()));
}

}  // namespace autobatch

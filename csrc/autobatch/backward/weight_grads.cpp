// Computes the gradients of weights from the products that a backward pass has collected. Joins
// products if one larger GEMM is faster.
#include "autobatch/backward/backward.h"
#include "autobatch/common/pool.h"
#include "autobatch/debug/trace.h"
#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/kernels/small_gemm.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <unordered_map>

namespace autobatch {
namespace {

// Small products of the same weight are joined: the rows of their factors are copied into one
// buffer. A product is small if it has fewer than kFewRows rows. A product of fewer than kJoinRows
// rows is also small if the copy costs less than another pass over the weight's gradient. For the
// gradient of a vector, which is a sum of rows, a copy is rarely worthwhile.
constexpr int64_t kJoinRows = 512;
constexpr int64_t kFewRows = 16;
// With kManyRows rows, the cost of one more pass over the weight's gradient is negligible. With a
// quarter of kManyRows rows, the cost is still small. So products with a quarter of kManyRows rows
// do not wait for more rows if their factors have at least kLargeFactors bytes.
constexpr int64_t kManyRows = 1024;
constexpr int64_t kLargeFactors = int64_t{1} << 18;  // in bytes

// Whether the rows are dense and evenly spaced, as in a matrix or in a range of its columns.
bool has_even_rows(const at::Tensor& t) {
  return (t.stride(1) == 1 || t.size(1) == 1) && t.stride(0) >= t.size(1);
}

bool adjoins(const at::Tensor& a, const at::Tensor& b) {  // b's rows directly follow a's rows
  const int64_t elements = a.size(0) * a.stride(0);
  return has_even_rows(a) && has_even_rows(b) && a.stride(0) == b.stride(0) &&
         static_cast<const char*>(a.const_data_ptr()) +
                 elements * static_cast<int64_t>(a.element_size()) ==
             b.const_data_ptr() &&
         a.storage().is_alias_of(b.storage());
}

bool is_joined(const WeightGradTerm& p) {
  const int64_t rows = p.left.size(0), width = p.left.size(1);
  if (!p.right.defined()) return rows < kFewRows;
  const int64_t height = p.right.size(1);
  return rows < kFewRows || (rows < kJoinRows && rows * (width + height) < width * height);
}

// Copies the rows of all parts into one matrix. The matrix uses pooled memory, because page faults
// of new memory took longer than the copy.
at::Tensor copied_together(const std::vector<at::Tensor>& parts) {
  int64_t rows = 0;
  for (const at::Tensor& part : parts) rows += part.size(0);
  const int64_t width = parts[0].size(1);
  at::Tensor out = pooled_empty(rows * width, parts[0].options()).view({rows, width});
  return at::cat_out(out, parts);
}

at::Tensor join(const at::Tensor& a, const at::Tensor& b) {
  return a.as_strided({a.size(0) + b.size(0), a.size(1)}, {a.stride(0), 1}, a.storage_offset());
}

// Joins products whose rows are adjacent in memory. Copies products of few rows into one buffer.
std::vector<WeightGradTerm> merged(std::vector<WeightGradTerm> products) {
  // Buffers are numbered in the order in which the products use them. If buffers were ordered by
  // address, each run could have different rounding errors.
  std::unordered_map<const void*, size_t> buffers;
  const auto key = [&](const WeightGradTerm& p) {
    const void* buffer = p.left.storage().unsafeGetStorageImpl();
    return std::pair(buffers.emplace(buffer, buffers.size()).first->second,
                     p.left.storage_offset());
  };
  for (const WeightGradTerm& p : products) key(p);
  std::stable_sort(
      products.begin(), products.end(),
      [&](const WeightGradTerm& a, const WeightGradTerm& b) { return key(a) < key(b); });
  std::vector<WeightGradTerm> out;
  for (WeightGradTerm& p : products) {
    if (!out.empty() && adjoins(out.back().left, p.left) &&
        (!p.right.defined() || adjoins(out.back().right, p.right))) {
      out.back().left = join(out.back().left, p.left);
      if (p.right.defined()) out.back().right = join(out.back().right, p.right);
    } else {
      out.push_back(std::move(p));
    }
  }
  std::vector<at::Tensor> lefts, rights;
  std::vector<WeightGradTerm> few;
  for (WeightGradTerm& p : out) {
    if (!is_joined(p)) {
      few.push_back(std::move(p));
      continue;
    }
    lefts.push_back(p.left);
    if (p.right.defined()) rights.push_back(p.right);
  }
  if (lefts.size() == 1) {
    few.push_back({lefts[0], rights.empty() ? at::Tensor() : rights[0]});
  } else if (!lefts.empty()) {
    few.push_back(
        {copied_together(lefts), rights.empty() ? at::Tensor() : copied_together(rights)});
  }
  return few;
}

}  // namespace

void add_to(const Region& region, const WeightGradTerm& p) {
  if (region.geometry->overlapping) {  // a weight made by `expand`: its elements share memory
    const at::Tensor sum = p.right.defined() ? multiply_transposed(p.left, p.right) : p.left.sum(0);
    scatter_add(sum.contiguous(), {region});
    return;
  }
  at::Tensor target = region_view(region);
  if (!p.right.defined()) {
    target.add_(p.left.sum(0).view(target.sizes()));
  } else if (target.dim() == 2) {
    add_transposed(target, p.left, p.right);
  } else {
    target.add_(multiply_transposed(p.left, p.right).view(target.sizes()));
  }
}

namespace {

void run_products_of(FlushRecord& record, BackwardTask& task, ValueId weight,
                     std::vector<WeightGradTerm> products) {
  std::vector<WeightGradTerm> few = merged(std::move(products));
  GradAccumulator accumulator(record, task, 0);
  // The result of a product can become the gradient of a whole graph input.
  if (at::Tensor* buffer = accumulator.untouched_graph_input(weight)) {
    const WeightGradTerm& first = few.back();
    *buffer = first.right.defined() ? multiply_transposed(first.left, first.right).view({-1})
                                    : first.left.sum(0).view({-1});
    few.pop_back();
  }
  if (few.empty()) return;
  const Region target = accumulator.target_behind(weight);
  for (const WeightGradTerm& p : few) add_to(target, p);
}

}  // namespace

void run_many_products(FlushRecord& record, BackwardTask& task, ValueId weight) {
  std::vector<WeightGradTerm>& products = task.products[weight];
  int64_t rows = 0, bytes = 0;
  for (const WeightGradTerm& p : products) {
    rows += p.left.size(0);
    bytes += static_cast<int64_t>(p.left.nbytes());
    if (p.right.defined()) bytes += static_cast<int64_t>(p.right.nbytes());
  }
  const int64_t many = bytes >= kLargeFactors ? kManyRows / 4 : kManyRows;
  if (rows >= many) run_products_of(record, task, weight, std::exchange(products, {}));
}

void run_products(FlushRecord& record, BackwardTask& task) {
  const ProfilerRange range("torch_autobatch::weight_gradients");
  const TraceTimer timer(record.trace.get(), "weight gradients");
  for (auto& [weight, products] : task.products) {
    if (!products.empty()) run_products_of(record, task, weight, std::move(products));
  }
  task.products.clear();
}

}  // namespace autobatch

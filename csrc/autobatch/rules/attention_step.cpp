#include "autobatch/rules/attention_step.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace autobatch {
namespace {

using at::Tensor;

constexpr size_t kQuery = 0, kKey = 1, kValue = 2, kMask = 3, kCausal = 5;

int64_t queries_of(const BatchView& batch, int64_t m) {
  return batch.operand_value(m, kQuery).geometry->sizes[2];
}

int64_t keys_of(const BatchView& batch, int64_t m) {
  return batch.operand_value(m, kKey).geometry->sizes[2];
}

// The memory of an operand or a result of shape [N, heads, T, width].
class Heads {
 public:
  explicit Heads(const Region& region)
      : data_(static_cast<char*>(region.buffer->mutable_data_ptr())),
        element_(region.buffer->element_size()),
        offset_(region.offset),
        geometry_(*region.geometry) {}

  int64_t num(size_t dim) const { return geometry_.sizes[dim]; }

  // Returns the matrix of one head: [T, width].
  MatrixPlace matrix(int64_t n, int64_t head) const {
    const auto& strides = geometry_.strides;
    const int64_t at = offset_ + n * strides[0] + head * strides[1];
    return {data_ + at * static_cast<int64_t>(element_), num(2), num(3), strides[2], strides[3]};
  }

 private:
  char* data_;
  size_t element_;
  int64_t offset_;
  const Geometry& geometry_;
};

// Returns the first `keys` elements of a row of `scores`, [rows, longest], as a matrix of one row.
MatrixPlace row_of(const Tensor& scores, int64_t row, int64_t keys) {
  auto* data = static_cast<char*>(scores.mutable_data_ptr());
  data += row * scores.size(1) * static_cast<int64_t>(scores.element_size());
  return {data, 1, keys, scores.size(1), 1};
}

// Returns a tensor for the scores, one row for each head of each member, filled with -inf. The
// length of a row is the largest number of keys in any member. The elements after the scores of a
// member's own keys keep the value -inf, so their attention weights are 0.
Tensor empty_scores(const Batch& batch, const Members& members) {
  int64_t rows = 0, longest = 0;
  for (const int64_t m : members) {
    const auto& sizes = batch.operand_value(m, kQuery).geometry->sizes;
    rows += sizes[0] * sizes[1];
    longest = std::max(longest, keys_of(batch, m));
  }
  const auto options = batch.operand_value(members.front(), kQuery).options();
  return pooled_empty({rows, longest}, options).fill_(-INFINITY);
}

// Calls f(member, n, head of the query, head of the keys, row of the scores) for each head.
template <class F>
void each_head(const Batch& batch, const Members& members, const F& f) {
  int64_t row = 0;
  for (const int64_t m : members) {
    const auto& q = batch.operand_value(m, kQuery).geometry->sizes;
    const int64_t shared = q[1] / batch.operand_value(m, kKey).geometry->sizes[1];
    for (int64_t n = 0; n < q[0]; ++n) {
      for (int64_t head = 0; head < q[1]; ++head) f(m, n, head, head / shared, row++);
    }
  }
}

// Writes `sums`, the logsumexp of each row of the scores, to result 1 of the members, [N, 1,
// heads].
void keep_sums(const Batch& batch, const Members& members, const Tensor& sums) {
  GeometryTable geometries;
  Regions from, to;
  int64_t row = 0;
  for (const int64_t m : members) {
    Region place = batch.result_region(m, 1);
    place.geometry = geometries.intern_contiguous({place.geometry->numel});
    from.push_back({&sums, row, place.geometry});
    to.push_back(place);
    row += place.geometry->numel;
  }
  copy_regions(from, to);
}

}  // namespace

bool is_attention_step(const BatchView& batch, int64_t m) {
  const Value& q = batch.operand_value(m, kQuery);
  const bool attends_to_all = !batch.argument(kCausal).toBool() || keys_of(batch, m) == 1;
  return queries_of(batch, m) == 1 && attends_to_all && !batch.given(kMask) &&
         has_host_memory(q.device) && has_cpu_kernels(q.dtype);
}

void run_attention_steps(Batch& batch, const Members& members, double scale) {
  const Tensor scores = empty_scores(batch, members);
  const c10::ScalarType dtype = scores.scalar_type();
  std::vector<MatrixProduct> products;
  each_head(batch, members, [&](int64_t m, int64_t n, int64_t head, int64_t of_key, int64_t row) {
    const Heads q(batch.operand_region(m, kQuery)), k(batch.operand_region(m, kKey));
    const MatrixPlace keys = k.matrix(n, of_key).transposed();
    products.push_back({row_of(scores, row, k.num(2)), q.matrix(n, head), keys});
  });
  run_matrix_products(products, dtype, /*disjoint=*/true);
  scores.mul_(scale);
  if (batch.needs_grad()) keep_sums(batch, members, at::logsumexp(scores, -1));
  const Tensor weights = at::_softmax(scores, -1, false);
  products.clear();
  each_head(batch, members, [&](int64_t m, int64_t n, int64_t head, int64_t of_key, int64_t row) {
    const Heads v(batch.operand_region(m, kValue)), out(batch.result_region(m, 0));
    products.push_back({out.matrix(n, head), row_of(weights, row, v.num(2)), v.matrix(n, of_key)});
  });
  run_matrix_products(products, dtype, /*disjoint=*/true);
}

}  // namespace autobatch

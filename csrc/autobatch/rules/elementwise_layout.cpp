#include "autobatch/rules/elementwise_layout.h"

#include <ATen/ExpandUtils.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>
#include <numeric>

namespace autobatch {
namespace {

using Order = c10::SmallVector<uint8_t, 6>;

// Returns the stride of the operand along dimension `d` of a result of these sizes. The stride is 0
// if the operand is repeated along `d`.
int64_t stride_along(const Geometry& g, at::IntArrayRef sizes, size_t d) {
  const size_t missing = sizes.size() - g.sizes.size();
  if (d < missing) return 0;
  return g.sizes[d - missing] == 1 && sizes[d] != 1 ? 0 : g.strides[d - missing];
}

bool is_dense(const Geometry& g) { return !g.overlapping && g.extent == g.numel; }

bool is_channels_last(const Geometry& g) {
  if (g.dim() == 4) return at::IntArrayRef(g.strides) == c10::get_channels_last_strides_2d(g.sizes);
  if (g.dim() == 5) return at::IntArrayRef(g.strides) == c10::get_channels_last_strides_3d(g.sizes);
  return false;
}

// Returns a number > 0 if dimension `a` of the result must have a larger stride than `b`, a number
// < 0 if `a` must have a smaller stride, and 0 if no operand decides the order. The first operand
// with different nonzero strides along the two dimensions decides. If the strides are equal and `a`
// is longer than `b`, `a` gets the larger stride.
int compare(at::ArrayRef<const Geometry*> operands, at::IntArrayRef sizes, size_t a, size_t b) {
  for (const Geometry* g : operands) {
    const int64_t along_a = stride_along(*g, sizes, a), along_b = stride_along(*g, sizes, b);
    if (along_a == 0 || along_b == 0) continue;
    if (along_a != along_b) return along_a < along_b ? -1 : 1;
    if (sizes[a] > sizes[b]) return 1;
  }
  return 0;
}

// Sorts the dimensions by insertion, starting at the innermost dimension, as TensorIterator does.
// Some pairs of dimensions have no defined order, so the result depends on the sorting algorithm.
Order order_of(at::ArrayRef<const Geometry*> operands, at::IntArrayRef sizes) {
  Order order(sizes.size());
  std::iota(order.rbegin(), order.rend(), uint8_t{0});
  for (size_t i = 1; i < order.size(); ++i) {
    size_t at = i;
    for (size_t before = i; before-- > 0;) {
      const int outside = compare(operands, sizes, order[before], order[at]);
      if (outside < 0) break;
      if (outside == 0) continue;
      std::swap(order[before], order[at]);
      at = before;
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace

const Geometry* given_geometry(const Tape& tape, const Value& value) {
  if (!value.is_graph_input() || value.parent != kNone) return value.geometry;
  const Geometry* given = tape.graph_inputs[value.index].given;
  return given != nullptr ? given : value.geometry;
}

bool row_major_or_expanded(const Geometry& g) {
  int64_t least = 1;
  for (int64_t d = g.dim() - 1; d >= 0; --d) {
    if (g.sizes[d] == 1 || g.strides[d] == 0) continue;
    if (g.strides[d] < least) return false;
    least = g.strides[d] * g.sizes[d];
  }
  return true;
}

const Geometry* dense_in_order(GeometryTable& table, at::IntArrayRef sizes,
                               at::ArrayRef<uint8_t> order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= sizes[order[i]];
  }
  return table.intern(sizes, strides);
}

const Geometry* elementwise_result(GeometryTable& table, at::ArrayRef<const Geometry*> operands,
                                   bool has_number) {
  std::vector<int64_t> sizes = operands[0]->sizes;
  bool same_sizes = !has_number || sizes.empty(), same_strides = true;
  bool row_major = true, channels_last = true, dense = true;
  for (const Geometry* g : operands) {
    if (g->sizes != operands[0]->sizes) {
      same_sizes = false;
      if (!at::are_expandable(sizes, g->sizes)) return nullptr;
      sizes = at::infer_size(sizes, g->sizes);
    }
    same_strides = same_strides && g->strides == operands[0]->strides;
    row_major = row_major && row_major_or_expanded(*g);
    channels_last = channels_last && is_channels_last(*g);
    dense = dense && is_dense(*g);
  }
  if (row_major) return table.intern_contiguous(sizes);
  if (c10::multiply_integers(sizes) == 0) return nullptr;
  if (same_sizes && (channels_last || (dense && same_strides))) return operands[0];
  return dense_in_order(table, sizes, order_of(operands, sizes));
}

const Geometry* preserved_layout(GeometryTable& table, const Geometry& operand) {
  if (operand.numel == 0) return nullptr;
  if (is_dense(operand)) return &operand;
  return table.intern(operand.sizes, at::infer_dense_strides(operand.sizes, operand.strides));
}

const Geometry* channels_last(GeometryTable& table, at::IntArrayRef sizes) {
  if (sizes.size() != 4 || c10::multiply_integers(sizes) == 0) return nullptr;
  return table.intern(sizes, c10::get_channels_last_strides_2d(sizes));
}

Order memory_order(const Geometry& geometry) {
  Order order(geometry.sizes.size());
  std::iota(order.begin(), order.end(), uint8_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](uint8_t a, uint8_t b) { return geometry.strides[a] > geometry.strides[b]; });
  return order;
}

const Geometry* in_memory_order(GeometryTable& table, const Geometry& operand,
                                const Geometry& result) {
  at::DimVector sizes, strides;
  for (const uint8_t d : memory_order(result)) {
    sizes.push_back(result.sizes[d]);
    strides.push_back(stride_along(operand, result.sizes, d));
  }
  return table.intern(sizes, strides);
}

}  // namespace autobatch

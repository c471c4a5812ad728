#include "autobatch/backward/view_gradient.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/permute.h>
#include <ATen/ops/reshape.h>
#include <ATen/ops/sum.h>

#include <algorithm>

namespace autobatch {
namespace {

using Ints = c10::SmallVector<int64_t, 6>;

// Returns the dimensions sorted by stride, the largest stride first. Dimensions of size 1 come
// before all other dimensions.
Ints memory_order(const Geometry& g) {
  Ints order;
  for (int64_t d = 0; d < g.dim(); ++d) order.push_back(d);
  const auto is_single = [&](int64_t d) { return g.sizes[d] == 1; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    if (is_single(a) || is_single(b)) return is_single(a) && !is_single(b);
    return g.strides[a] > g.strides[b];
  });
  return order;
}

bool is_identity(const Ints& order) { return std::is_sorted(order.begin(), order.end()); }

at::Tensor in_shape(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return tensor.sizes() == sizes ? tensor : at::reshape(tensor, sizes);
}

// A box in memory that is treated as an array with the sizes `extents`. In dimension d, the box has
// `sizes[d]` elements, starting at `starts[d]`.
struct Box {
  Ints extents, starts, sizes;

  bool is_all() const { return extents == sizes; }
  // Returns the numbers of zeros before and after the box. The last dimension comes first, as in
  // the argument of constant_pad_nd.
  Ints padding() const {
    Ints padding;
    for (size_t d = extents.size(); d-- > 0;) {
      padding.push_back(starts[d]);
      padding.push_back(extents[d] - starts[d] - sizes[d]);
    }
    return padding;
  }
};

// Describes a strided region as a box. Dimensions must be ordered from the largest stride to the
// smallest. Returns nullopt if a stride does not divide the next larger stride, or if the region
// extends beyond the end of a row of the box.
std::optional<Box> box_of(const Ints& sizes, const Ints& strides, int64_t offset, int64_t numel) {
  Box box;
  int64_t outer = numel;
  const auto add = [&](int64_t stride, int64_t size) {
    if (outer % stride != 0) return false;
    box.extents.push_back(outer / stride);
    box.starts.push_back(offset / stride);
    box.sizes.push_back(size);
    outer = stride;
    offset %= stride;
    return box.starts.back() + size <= box.extents.back();
  };
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!add(strides[d], sizes[d])) return std::nullopt;
  }
  if (outer > 1 && !add(1, 1)) return std::nullopt;
  return box;
}

// Returns a tensor with the sizes of the dense geometry `g`. `tensor` contains the elements in
// memory order.
at::Tensor from_memory_order(const at::Tensor& tensor, const Geometry& g) {
  const Ints order = memory_order(g);
  if (is_identity(order)) return in_shape(tensor, g.sizes);
  Ints sizes, back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    sizes.push_back(g.sizes[order[i]]);
    back[order[i]] = static_cast<int64_t>(i);
  }
  return at::permute(in_shape(tensor, sizes), back);
}

}  // namespace

std::optional<at::Tensor> gradient_behind_view(const Value& view, const Value& whole,
                                               const at::Tensor& gradient) {
  if (view.geometry == whole.geometry && view.offset == whole.offset) return gradient;
  // The ops below may be captured and add values to the graph. After that, `view` and `whole` may
  // be dangling references.
  const Geometry &from = *view.geometry, &to = *whole.geometry;
  const int64_t offset = view.offset - whole.offset;
  if (to.overlapping || to.numel != to.extent || from.numel == 0) return std::nullopt;
  if (from.numel == to.numel && from.contiguous && to.contiguous)
    return in_shape(gradient, to.sizes);
  Ints repeated;
  for (int64_t d = 0; d < from.dim(); ++d) {
    if (from.sizes[d] > 1 && from.strides[d] == 0) repeated.push_back(d);
  }
  at::Tensor result = repeated.empty() ? gradient : at::sum(gradient, repeated, /*keepdim=*/true);
  Ints order, sizes, strides;
  for (const int64_t d : memory_order(from)) {
    order.push_back(d);
    if (from.sizes[d] == 1 || from.strides[d] == 0) continue;
    sizes.push_back(from.sizes[d]);
    strides.push_back(from.strides[d]);
  }
  for (size_t d = 1; d < sizes.size(); ++d) {
    if (strides[d - 1] < strides[d] * sizes[d]) return std::nullopt;
  }
  const auto box = box_of(sizes, strides, offset, to.numel);
  if (!box.has_value()) return std::nullopt;
  if (!is_identity(order)) result = at::permute(result, order);
  result = in_shape(result, box->sizes);
  if (!box->is_all()) result = at::constant_pad_nd(result, box->padding(), 0);
  return from_memory_order(result, to);
}

}  // namespace autobatch

#include "autobatch/graph/view_ops.h"

#include "autobatch/common/overlap.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorUtils.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

using Arguments = at::ArrayRef<c10::IValue>;

ViewGeometry geometry_of(const at::Tensor& tensor) {
  ViewGeometry g;
  g.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  g.strides.assign(tensor.strides().begin(), tensor.strides().end());
  g.offset = tensor.unsafeGetTensorImpl()->storage_offset();
  return g;
}

ViewGeometry self(Arguments arguments) { return geometry_of(arguments[0].toTensor()); }

// Returns the dimension counted from the front, or -1 if the dimension is out of range.
int64_t wrap(int64_t dim, int64_t rank) {
  if (dim < 0) dim += rank;
  return dim >= 0 && dim < rank ? dim : -1;
}

void give(ViewResult& result, ViewGeometry view) {
  result.views.push_back(std::move(view));
  result.outcome = ViewOutcome::kViews;
}

ViewGeometry narrowed(const ViewGeometry& from, int64_t dim, int64_t start, int64_t length) {
  ViewGeometry g = from;
  g.offset += start * g.strides[dim];
  g.sizes[dim] = length;
  return g;
}

void drop_dim(ViewGeometry& g, int64_t dim) {
  g.sizes.erase(g.sizes.begin() + dim);
  g.strides.erase(g.strides.begin() + dim);
}

void select(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  const int64_t dim = wrap(arguments[1].toInt(), static_cast<int64_t>(g.sizes.size()));
  if (dim < 0) return;
  const int64_t index = wrap(arguments[2].toInt(), g.sizes[dim]);
  if (index < 0) return;
  g.offset += index * g.strides[dim];
  drop_dim(g, dim);
  give(result, std::move(g));
}

void slice(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  const int64_t dim = wrap(arguments[1].toInt(), static_cast<int64_t>(g.sizes.size()));
  const int64_t step = arguments[4].toInt();
  if (dim < 0 || step <= 0) return;
  const int64_t size = g.sizes[dim];
  const auto clip = [size](int64_t i) {
    return std::clamp<int64_t>(i < 0 ? i + size : i, 0, size);
  };
  const int64_t start = clip(arguments[2].isNone() ? 0 : arguments[2].toInt());
  const int64_t end = std::max(start, arguments[3].isNone() ? size : clip(arguments[3].toInt()));
  g.offset += start * g.strides[dim];
  g.sizes[dim] = (end - start + step - 1) / step;
  g.strides[dim] *= step;
  give(result, std::move(g));
}

void narrow(Arguments arguments, ViewResult& result) {
  if (!arguments[2].isInt()) return;  // the overload whose start is a tensor reads data
  const ViewGeometry g = self(arguments);
  const int64_t dim = wrap(arguments[1].toInt(), static_cast<int64_t>(g.sizes.size()));
  if (dim < 0) return;
  int64_t start = arguments[2].toInt();
  const int64_t length = arguments[3].toInt();
  if (start < 0) start += g.sizes[dim];
  if (start < 0 || length < 0 || start + length > g.sizes[dim]) return;
  give(result, narrowed(g, dim, start, length));
}

// Adds to `result` the views that split `g` into pieces of size `length` along `dim`. The last
// piece may be smaller.
void split_evenly(const ViewGeometry& g, int64_t dim, int64_t length, ViewResult& result) {
  for (int64_t start = 0; start < g.sizes[dim]; start += length) {
    give(result, narrowed(g, dim, start, std::min(length, g.sizes[dim] - start)));
  }
}

void split(Arguments arguments, ViewResult& result) {
  const ViewGeometry g = self(arguments);
  result.list = true;
  const int64_t length = arguments[1].toInt();
  const int64_t dim = wrap(arguments[2].toInt(), static_cast<int64_t>(g.sizes.size()));
  if (dim < 0 || length <= 0 || g.sizes[dim] == 0) return;
  split_evenly(g, dim, length, result);
}

void chunk(Arguments arguments, ViewResult& result) {
  const ViewGeometry g = self(arguments);
  result.list = true;
  const int64_t chunks = arguments[1].toInt();
  const int64_t dim = wrap(arguments[2].toInt(), static_cast<int64_t>(g.sizes.size()));
  if (dim < 0 || chunks <= 0 || g.sizes[dim] == 0) return;
  split_evenly(g, dim, (g.sizes[dim] + chunks - 1) / chunks, result);
}

void split_with_sizes(Arguments arguments, ViewResult& result) {
  const ViewGeometry g = self(arguments);
  result.list = true;
  const auto lengths = arguments[1].toIntVector();
  const int64_t dim = wrap(arguments[2].toInt(), static_cast<int64_t>(g.sizes.size()));
  if (dim < 0) return;
  int64_t total = 0;
  for (int64_t length : lengths) {
    if (length < 0) return;
    total += length;
  }
  if (total != g.sizes[dim]) return;
  int64_t start = 0;
  for (int64_t length : lengths) {
    give(result, narrowed(g, dim, start, length));
    start += length;
  }
}

void unbind(Arguments arguments, ViewResult& result) {
  const ViewGeometry g = self(arguments);
  result.list = true;
  const int64_t dim = wrap(arguments[1].toInt(), static_cast<int64_t>(g.sizes.size()));
  if (dim < 0 || g.sizes[dim] == 0) return;
  for (int64_t i = 0; i < g.sizes[dim]; ++i) {
    ViewGeometry view = g;
    view.offset += i * g.strides[dim];
    drop_dim(view, dim);
    give(result, std::move(view));
  }
}

void squeeze(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  for (auto dim = static_cast<int64_t>(g.sizes.size()) - 1; dim >= 0; --dim) {
    if (g.sizes[dim] == 1) drop_dim(g, dim);
  }
  give(result, std::move(g));
}

void squeeze_dim(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  const int64_t dim = wrap(arguments[1].toInt(), static_cast<int64_t>(g.sizes.size()));
  if (dim < 0) return;
  if (g.sizes[dim] == 1) drop_dim(g, dim);
  give(result, std::move(g));
}

void unsqueeze(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  const auto rank = static_cast<int64_t>(g.sizes.size());
  const int64_t dim = wrap(arguments[1].toInt(), rank + 1);
  if (dim < 0) return;
  const int64_t stride = dim < rank ? g.sizes[dim] * g.strides[dim] : 1;
  g.sizes.insert(g.sizes.begin() + dim, 1);
  g.strides.insert(g.strides.begin() + dim, stride);
  give(result, std::move(g));
}

void transpose(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  const auto rank = static_cast<int64_t>(g.sizes.size());
  const int64_t a = wrap(arguments[1].toInt(), rank);
  const int64_t b = wrap(arguments[2].toInt(), rank);
  if (a < 0 || b < 0) return;
  std::swap(g.sizes[a], g.sizes[b]);
  std::swap(g.strides[a], g.strides[b]);
  give(result, std::move(g));
}

void t(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  if (g.sizes.size() > 2) return;
  if (g.sizes.size() == 2) {
    std::swap(g.sizes[0], g.sizes[1]);
    std::swap(g.strides[0], g.strides[1]);
  }
  give(result, std::move(g));
}

void permute(Arguments arguments, ViewResult& result) {
  const ViewGeometry g = self(arguments);
  const auto dims = arguments[1].toIntVector();
  const auto rank = static_cast<int64_t>(g.sizes.size());
  if (static_cast<int64_t>(dims.size()) != rank) return;
  ViewGeometry view;
  view.offset = g.offset;
  std::vector<bool> seen(dims.size(), false);
  for (int64_t d : dims) {
    const int64_t dim = wrap(d, rank);
    if (dim < 0 || seen[dim]) return;
    seen[dim] = true;
    view.sizes.push_back(g.sizes[dim]);
    view.strides.push_back(g.strides[dim]);
  }
  give(result, std::move(view));
}

void expand_to(const ViewGeometry& g, at::IntArrayRef sizes, ViewResult& result) {
  if (sizes.size() < g.sizes.size()) return;
  const size_t added = sizes.size() - g.sizes.size();
  for (size_t d = 0; d < sizes.size(); ++d) {
    const bool is_new = d < added;
    const int64_t old_size = is_new ? 1 : g.sizes[d - added];
    const int64_t size = sizes[d] == -1 && !is_new ? old_size : sizes[d];
    if (size < 0 || (size != old_size && old_size != 1)) return;  // eager raises the error
  }
  const auto expanded = at::inferExpandGeometry_dimvector(g.sizes, g.strides, sizes);
  ViewGeometry view;
  view.offset = g.offset;
  view.sizes = expanded.sizes;
  view.strides = expanded.strides;
  give(result, std::move(view));
}

void expand(Arguments arguments, ViewResult& result) {
  expand_to(self(arguments), arguments[1].toIntVector(), result);
}

void expand_as(Arguments arguments, ViewResult& result) {
  expand_to(self(arguments), arguments[1].toTensor().sizes(), result);
}

// Sets `result` for a reshape of `tensor` to `sizes` (one size may be -1). The result is a view if
// the strides allow one. Otherwise the result is a copy if `may_copy` is true.
void reshape_to(const at::Tensor& tensor, std::vector<int64_t> sizes, bool may_copy,
                ViewResult& result) {
  int64_t known = 1;
  int64_t unknown = -1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == -1 && unknown < 0) {
      unknown = static_cast<int64_t>(d);
    } else if (sizes[d] < 0) {
      return;
    } else {
      known *= sizes[d];
    }
  }
  if (unknown >= 0) {
    if (known == 0 || tensor.numel() % known != 0) return;
    sizes[unknown] = tensor.numel() / known;
    known *= sizes[unknown];
  }
  if (known != tensor.numel()) return;
  ViewGeometry g;
  g.sizes.assign(sizes.begin(), sizes.end());
  g.offset = tensor.unsafeGetTensorImpl()->storage_offset();
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), sizes);
  if (strides.has_value()) {
    g.strides.assign(strides->begin(), strides->end());
    give(result, std::move(g));
  } else if (may_copy) {
    result.views.push_back(std::move(g));
    result.outcome = ViewOutcome::kCopy;
  }
}

void view(Arguments arguments, ViewResult& result) {
  if (!arguments[1].isIntList()) return;  // the overload view.dtype is not supported
  reshape_to(arguments[0].toTensor(), arguments[1].toIntVector(), false, result);
}

void view_as(Arguments arguments, ViewResult& result) {
  reshape_to(arguments[0].toTensor(), arguments[1].toTensor().sizes().vec(), false, result);
}

void reshape_as(Arguments arguments, ViewResult& result) {
  reshape_to(arguments[0].toTensor(), arguments[1].toTensor().sizes().vec(), true, result);
}

void reshape(Arguments arguments, ViewResult& result) {
  reshape_to(arguments[0].toTensor(), arguments[1].toIntVector(), true, result);
}

// Handles only dense tensors, and only views whose elements are distinct elements of the tensor.
// For other views, eager drops the gradient of elements outside the tensor, and divides the
// gradient of an element that occurs several times.
void as_strided(Arguments arguments, ViewResult& result) {
  const at::Tensor& tensor = arguments[0].toTensor();
  if (!tensor.is_non_overlapping_and_dense()) return;
  const int64_t start = tensor.unsafeGetTensorImpl()->storage_offset();
  ViewGeometry g;
  for (int64_t size : arguments[1].toIntVector()) g.sizes.push_back(size);
  for (int64_t stride : arguments[2].toIntVector()) g.strides.push_back(stride);
  g.offset = arguments[3].isNone() ? start : arguments[3].toInt();
  if (g.sizes.size() != g.strides.size() || g.offset < start) return;
  int64_t last = 0;  // distance of the last element from the first
  for (size_t d = 0; d < g.sizes.size(); ++d) {
    if (g.sizes[d] <= 0 || g.strides[d] < 0) return;
    last += g.strides[d] * (g.sizes[d] - 1);
  }
  if (overlaps(g.sizes, g.strides)) return;
  if (g.offset + last < start + tensor.numel()) give(result, std::move(g));
}

// memory_view(x, sizes, strides) is a view of the memory of x that begins at the first element of
// x. As in as_strided, the view may contain elements that lie between the elements of x. Their
// gradients are passed to the tensor that owns the memory.
void memory_view(Arguments arguments, ViewResult& result) {
  ViewGeometry g = self(arguments);
  const auto sizes = arguments[1].toIntVector(), strides = arguments[2].toIntVector();
  g.sizes.assign(sizes.begin(), sizes.end());
  g.strides.assign(strides.begin(), strides.end());
  if (!overlaps(g.sizes, g.strides)) give(result, std::move(g));
}

void same(Arguments arguments, ViewResult& result) { give(result, self(arguments)); }

struct Entry {
  std::string_view op;
  ViewFunction function;
};

constexpr Entry kViews[] = {
    {"aten::select.int", select},
    {"aten::slice.Tensor", slice},
    {"aten::narrow", narrow},
    {"aten::split.Tensor", split},
    {"aten::chunk", chunk},
    {"aten::split.sizes", split_with_sizes},
    {"aten::split_with_sizes", split_with_sizes},
    {"aten::unbind.int", unbind},
    {"aten::squeeze", squeeze},
    {"aten::squeeze.dim", squeeze_dim},
    {"aten::unsqueeze", unsqueeze},
    {"aten::transpose.int", transpose},
    {"aten::t", t},
    {"aten::permute", permute},
    {"aten::expand", expand},
    {"aten::expand_as", expand_as},
    {"aten::view", view},
    {"aten::view_as", view_as},
    {"aten::reshape_as", reshape_as},
    {"aten::_unsafe_view", view},
    {"aten::reshape", reshape},
    {"aten::detach", same},
    {"aten::alias", same},
    {"aten::as_strided", as_strided},
    {"autobatch::memory_view", memory_view},
};

}  // namespace

ViewFunction find_view_function(std::string_view op) {
  for (const Entry& entry : kViews) {
    if (entry.op == op) return entry.function;
  }
  return nullptr;
}

}  // namespace autobatch

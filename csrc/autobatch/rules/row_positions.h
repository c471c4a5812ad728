// Computes the rows that the indices of an op refer to. Rows are counted in the concatenated
// tensors of all members of a batch. A row consists of the `width` elements of the dimensions after
// the indexed dimensions.
#pragma once

#include "autobatch/rules/rule.h"

#include <optional>

namespace autobatch {

// Describes how an op's indices refer to positions of a tensor x, and which operands are indices.
struct RowIndexing {
  enum class Kind : uint8_t {
    kLists,  // index_add, x[:, i, j]: one index tensor per dimension, starting at dimension `dim`
    kEach,   // scatter, gather: one index per element, along `dim`
  };
  Kind kind = Kind::kLists;
  int64_t dim = 0;
  size_t lists = 1;       // number of index operands: operands 1 to `lists`
  bool from_end = false;  // whether negative indices count from the end
};

// Geometries of the index operands of a call that is being captured, or of a member of a batch.
using IndexGeometries = c10::SmallVector<const Geometry*, 2>;

// Returns the number of elements in a row of x. For kEach, the row includes trailing dimensions
// along which the index is expanded.
int64_t row_width(const RowIndexing& indexing, const Geometry& x, const IndexGeometries& indices);
// Returns the number of elements in a row of a batch, or 1 if the row widths of the members differ.
// During capture, all members have the same width. After capture, a read may replace an expanded
// index by a copy that is not expanded (split_graph.cpp).
int64_t row_width(const RowIndexing& indexing, const BatchView& batch);

// Returns the sizes of the result of a lookup in x: the sizes of the lookups, followed by the sizes
// of a row. Returns nothing if the indices do not fit x or do not fit together. Eager then raises
// the error.
std::optional<std::vector<int64_t>> lookup_sizes(const RowIndexing& indexing, const Geometry& x,
                                                 const IndexGeometries& indices);

// Add the indices as the operands after x. In capture_index, argument `index` is a tensor of
// indices along the dimension that argument `dim` contains. In capture_list, argument `list` is a
// list of tensors and Nones. Return nothing if the indices are not int32 or int64, or if the list
// contains a None between two tensors.
std::optional<RowIndexing> capture_index(NodeBuilder& builder, RowIndexing::Kind kind, size_t dim,
                                         size_t index);
std::optional<RowIndexing> capture_list(NodeBuilder& builder, size_t list);
// Return the indexing of a batch whose calls were captured by capture_index (indexing_of) or
// capture_list (indexing_of_list).
RowIndexing indexing_of(const BatchView& batch, RowIndexing::Kind kind, size_t dim);
RowIndexing indexing_of_list(const BatchView& batch);

// Return the geometries of the index operands of the captured call, or of member m of a batch.
IndexGeometries index_geometries(const RowIndexing& indexing, const NodeBuilder& builder);
IndexGeometries index_geometries(const RowIndexing& indexing, const BatchView& batch, int64_t m);

// Returns the rows that the indices of all members refer to, in row-major order of the lookups:
// int64 [R], on the device of the indices. `first` contains, for each member, the first row of the
// member's tensor x. `width` is the row_width of the batch. On the CPU, raises an error for an
// index out of range. The error message is less detailed than in eager.
at::Tensor row_positions(const RowIndexing& indexing, BatchView& batch, at::IntArrayRef first,
                         int64_t width);

}  // namespace autobatch

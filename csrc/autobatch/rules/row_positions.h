// Computes the rows that the indices of an op refer to. Rows are counted in the concatenated
// tensors of all members of a batch. A row consists of the `width` elements behind the indexed
// dimensions.
#pragma once

#include "autobatch/rules/rule.h"

#include <optional>

namespace autobatch {

// Describes how an op's indices refer to positions of a tensor x, and which operands are indices.
struct RowIndexing {
  enum class Kind : uint8_t {
    kLists,  // index_add, x[:, i, j]: one index tensor per dimension, from dimension `dim` on
    kEach,   // scatter, gather: one index per element, along `dim`
  };
  Kind kind = Kind::kLists;
  int64_t dim = 0;
  size_t lists = 1;       // number of index operands: operands 1 to `lists`
  bool from_end = false;  // whether negative indices count from the end
};

// Geometries of the index operands, in capture or in a batch.
using IndexGeometries = c10::SmallVector<const Geometry*, 2>;

// Returns the number of elements in a row of x. For kEach, trailing dimensions along which the
// index is expanded belong to the row.
int64_t row_width(const RowIndexing& indexing, const Geometry& x, const IndexGeometries& indices);
// Returns the number of elements in a row of a batch, or 1 if members differ. During capture, all
// members have the same width. After capture, a read may have replaced an expanded index by a copy
// that is not expanded (split_graph.cpp).
int64_t row_width(const RowIndexing& indexing, const BatchView& batch);

// Returns the sizes of the result of a lookup in x: the sizes of the lookups, followed by the sizes
// of a row. Returns nothing if the indices do not fit x or each other; eager then raises the error.
std::optional<std::vector<int64_t>> lookup_sizes(const RowIndexing& indexing, const Geometry& x,
                                                 const IndexGeometries& indices);

// Add the indices as the operands after x. In capture_index the indices are argument `index`, a
// tensor, along the dimension in argument `dim`. In capture_list the indices are argument `list`, a
// list of tensors and Nones. Return nothing if the indices are not int32 or int64, or if there are
// Nones between them.
std::optional<RowIndexing> capture_index(NodeBuilder& builder, RowIndexing::Kind kind, size_t dim,
                                         size_t index);
std::optional<RowIndexing> capture_list(NodeBuilder& builder, size_t list);
// Return the indexing of a batch of calls that capture_index or capture_list captured.
RowIndexing indexing_of(const BatchView& batch, RowIndexing::Kind kind, size_t dim);
RowIndexing indexing_of_list(const BatchView& batch);

// Return the geometries of the index operands, of the call or of member m.
IndexGeometries index_geometries(const RowIndexing& indexing, const NodeBuilder& builder);
IndexGeometries index_geometries(const RowIndexing& indexing, const BatchView& batch, int64_t m);

// Returns the rows that the indices of all members refer to, in row-major order of the lookups:
// int64 [R], on the device of the indices. `first`: by member, the first row of its tensor x.
// `width`: row_width of the batch. On the CPU, raises an error for an index out of range. The error
// message has less detail than eager's.
at::Tensor row_positions(const RowIndexing& indexing, BatchView& batch, at::IntArrayRef first,
                         int64_t width);

}  // namespace autobatch

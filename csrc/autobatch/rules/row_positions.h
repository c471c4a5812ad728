// Which rows the indices of an op name, where the tensors of all members of a batch lie one after
// the other. A row is the `width` elements behind the dimensions that are indexed.
#pragma once

#include "autobatch/rules/rule.h"

#include <optional>

namespace autobatch {

// How an op's indices stand for places of a tensor x, and in which operands they are.
struct RowIndexing {
  enum class Kind : uint8_t {
    kLists,  // index_add, x[:, i, j]: lists for dimensions from `dim` on, one tensor a dimension
    kEach,   // scatter, gather: along `dim`, one index for each element
  };
  Kind kind = Kind::kLists;
  int64_t dim = 0;
  size_t lists = 1;       // operands 1 to `lists`
  bool from_end = false;  // whether -1 is the last
};

// Geometries of the index operands, as a rule sees them in capture or in a batch.
using IndexGeometries = c10::SmallVector<const Geometry*, 2>;

// Elements of a row of x. A dimension over which an index was expanded belongs to the row.
int64_t row_width(const RowIndexing& indexing, const Geometry& x, const IndexGeometries& indices);
// The same of the rows of a batch; one element where members differ. They had the same in capture,
// but a read in between may have put a copy, which is not expanded, in an index's place
// (split.cpp).
int64_t row_width(const RowIndexing& indexing, const BatchView& batch);

// What op `x[indices]` gives: the sizes of the lookups, then those of a row. Nothing if the indices
// do not fit x or each other; eager raises the error.
std::optional<std::vector<int64_t>> lookup_sizes(const RowIndexing& indexing, const Geometry& x,
                                                 const IndexGeometries& indices);

// Makes the indices operands, those behind x: argument `index`, a tensor, along argument `dim`; or
// a list of tensors and Nones. Nothing if they are no integers, or Nones stand between them.
std::optional<RowIndexing> capture_index(NodeBuilder& builder, RowIndexing::Kind kind, size_t dim,
                                         size_t index);
std::optional<RowIndexing> capture_list(NodeBuilder& builder, size_t list);
// The same of a batch of such calls.
RowIndexing indexing_of(const BatchView& batch, RowIndexing::Kind kind, size_t dim);
RowIndexing indexing_of_list(const BatchView& batch);

// The geometries of the index operands.
IndexGeometries index_geometries(const RowIndexing& indexing, const NodeBuilder& builder);
IndexGeometries index_geometries(const RowIndexing& indexing, const BatchView& batch, int64_t m);

// The rows that all members' indices name, int64, in row-major order of the lookups: [R], on the
// device of the indices. `first`: the row at which each member's tensor x begins; `width`: that of
// the batch's rows. Raises an error for an index out of range; eager's own names it better.
at::Tensor row_positions(const RowIndexing& indexing, BatchView& batch, at::IntArrayRef first,
                         int64_t width);

}  // namespace autobatch

#include "autobatch/rules/row_positions.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/cuda/row_table.h"
#include "autobatch/kernels/gather_device.h"
#include "autobatch/kernels/to_device.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <utility>

namespace autobatch {
namespace {

using at::Tensor;
using Kind = RowIndexing::Kind;

int64_t product(const std::vector<int64_t>& sizes, int64_t from, int64_t to) {
  int64_t out = 1;
  for (int64_t d = from; d < to; ++d) out *= sizes[d];
  return out;
}

int64_t dims_with_lists(const RowIndexing& indexing) {
  return indexing.dim + static_cast<int64_t>(indexing.lists);
}

// Returns the number of dimensions of x before a row, for the longest row that the index allows.
int64_t least_leading_dims(const RowIndexing& indexing, const Geometry& x,
                           const IndexGeometries& indices) {
  if (indexing.kind == Kind::kLists) return dims_with_lists(indexing);
  const Geometry& index = *indices[0];
  int64_t leading = x.dim();
  const auto is_expanded = [&](int64_t d) {
    return index.sizes[d] == x.sizes[d] && (index.strides[d] == 0 || index.sizes[d] == 1);
  };
  while (leading > indexing.dim + 1 && is_expanded(leading - 1)) --leading;
  return leading;
}

// Returns the number of dimensions of x before a row of `width` elements.
int64_t leading_dims(const RowIndexing& indexing, const Geometry& x, int64_t width) {
  if (indexing.kind == Kind::kLists) return dims_with_lists(indexing);
  int64_t leading = x.dim();
  for (int64_t elements = 1; elements != width; elements *= x.sizes[leading]) --leading;
  return leading;
}

std::optional<std::vector<int64_t>> broadcast(const IndexGeometries& indices) {
  std::vector<int64_t> sizes = indices[0]->sizes;
  for (const Geometry* index : indices) {
    if (sizes == index->sizes) continue;
    if (!at::are_expandable(sizes, index->sizes)) return std::nullopt;
    sizes = at::infer_size(sizes, index->sizes);
  }
  return sizes;
}

bool is_integral(const Value& index) { return index.dtype == at::kLong || index.dtype == at::kInt; }

std::optional<int64_t> dim_of(const c10::IValue& argument, int64_t rank) {
  if (!argument.isInt()) return std::nullopt;
  const int64_t dim = argument.toInt() + (argument.toInt() < 0 ? rank : 0);
  return dim >= 0 && dim < rank ? std::optional(dim) : std::nullopt;
}

// --- the lookups of a member ---

// Provides the values of one index operand to the lookups.
class IndexValues {
 public:
  enum class Kind : uint8_t {
    kInPlace,    // the values are read in the operand's own memory, on any device
    kCopied,     // the values are read in a copy of all members' values, int64 on the host
    kPositions,  // each value is replaced by its position among all members' values, on the host
  };

  IndexValues(BatchView& batch, size_t slot, Kind kind) : batch_(batch), slot_(slot) {
    if (kind == Kind::kInPlace) return;
    copy_ = kind == Kind::kCopied ? batch.flat(slot).to(at::kLong).contiguous() : positions();
    next_ = copy_.const_data_ptr<int64_t>();
  }

  // Returns the address of the values of member m. Sets `strides` to the strides of the values
  // after expansion to `sizes`. Must be called once for each member, in order.
  const void* read(int64_t m, at::IntArrayRef sizes, at::DimVector& strides) {
    const Geometry& g = *batch_.operand_value(m, slot_).geometry;
    strides.assign(sizes.size(), 0);
    const size_t missing = sizes.size() > g.sizes.size() ? sizes.size() - g.sizes.size() : 0;
    int64_t dense = 1;
    for (size_t d = g.sizes.size(); d-- > 0;) {
      const bool kept = d + missing < sizes.size() && g.sizes[d] != 1;
      if (kept) strides[d + missing] = next_ == nullptr ? g.strides[d] : dense;
      dense *= g.sizes[d];
    }
    if (next_ == nullptr) return batch_.operand_region(m, slot_).address();
    return std::exchange(next_, next_ + g.numel);
  }

 private:
  Tensor positions() const {
    int64_t count = 0;
    for (int64_t m = 0; m < batch_.size(); ++m) {
      count += batch_.operand_value(m, slot_).geometry->numel;
    }
    return at::arange(count, at::kLong);
  }

  BatchView& batch_;
  size_t slot_;
  Tensor copy_;  // undefined if the values are read in place
  const int64_t* next_ = nullptr;
};

RowLookups lookups_of(const RowIndexing& indexing, const Geometry& x,
                      const IndexGeometries& indices, std::vector<IndexValues>& values, int64_t m,
                      int64_t width) {
  RowLookups out;
  const int64_t leading = leading_dims(indexing, x, width);
  if (indexing.kind == Kind::kEach) {
    const Geometry& index = *indices[0];
    out.sizes.assign(index.sizes.begin(), index.sizes.begin() + leading);
    for (int64_t d = 0; d < leading; ++d) out.steps.push_back(product(x.sizes, d + 1, leading));
    const int64_t step = std::exchange(out.steps[indexing.dim], 0);
    out.lists.push_back({nullptr, {}, x.sizes[indexing.dim], step});
    out.lists[0].values = values[0].read(m, index.sizes, out.lists[0].strides);
    out.lists[0].strides.resize(static_cast<size_t>(leading));
    return out;
  }
  const std::vector<int64_t> shape = *broadcast(indices);
  out.sizes.assign(shape.begin(), shape.end());
  out.steps.assign(shape.size(), 0);
  if (indexing.dim > 0) {
    out.sizes.insert(out.sizes.begin(), product(x.sizes, 0, indexing.dim));
    out.steps.insert(out.steps.begin(), product(x.sizes, indexing.dim, leading));
  }
  for (size_t l = 0; l < indexing.lists; ++l) {
    const int64_t d = indexing.dim + static_cast<int64_t>(l);
    RowLookups::List list{nullptr, {}, x.sizes[d], product(x.sizes, d + 1, leading)};
    list.values = values[l].read(m, shape, list.strides);
    if (indexing.dim > 0) list.strides.insert(list.strides.begin(), 0);
    out.lists.push_back(std::move(list));
  }
  return out;
}

// The lookups of all members. `values` owns the memory of the index values, unless the lookups read
// the operands' own memory.
struct AllLookups {
  AllLookups(const RowIndexing& indexing, BatchView& batch, at::IntArrayRef first, int64_t width,
             IndexValues::Kind kind) {
    for (size_t l = 1; l <= indexing.lists; ++l) values.emplace_back(batch, l, kind);
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Geometry& x = *batch.operand_value(m, 0).geometry;
      const IndexGeometries indices = index_geometries(indexing, batch, m);
      members.push_back(lookups_of(indexing, x, indices, values, m, width));
      members.back().first = first[m];
      count += members.back().count();
    }
  }

  std::vector<IndexValues> values;
  std::vector<RowLookups> members;
  int64_t count = 0;
};

// --- on the host ---

// By list: the offset of an index in the list's values.
using Offsets = c10::SmallVector<int64_t, 2>;

const int64_t* values_of(const RowLookups::List& list) {
  return static_cast<const int64_t*>(list.values);
}

// Writes the row numbers of all lookups of one member. The indices of the member must be int64 in
// host memory.
class RowWriter {
 public:
  RowWriter(const RowLookups& lookups, bool from_end) : lookups_(lookups), from_end_(from_end) {}

  int64_t* write(int64_t* to) const { return write(0, lookups_.first, {}, to); }

 private:
  int64_t* write(size_t d, int64_t row, Offsets offsets, int64_t* to) const {
    const auto& [first, sizes, steps, lists] = lookups_;
    offsets.resize(lists.size(), 0);
    if (d == sizes.size()) {
      for (size_t l = 0; l < lists.size(); ++l) {
        row += rows_at(lists[l], values_of(lists[l])[offsets[l]]);
      }
      *to = row;
      return to + 1;
    }
    if (d + 1 == sizes.size() && lists.size() == 1) {
      const RowLookups::List& list = lists[0];
      const int64_t* from = values_of(list) + offsets[0];
      for (int64_t i = 0; i < sizes[d]; ++i) {
        *to++ = row + i * steps[d] + rows_at(list, from[i * list.strides[d]]);
      }
      return to;
    }
    for (int64_t i = 0; i < sizes[d]; ++i, row += steps[d]) {
      to = write(d + 1, row, offsets, to);
      for (size_t l = 0; l < lists.size(); ++l) offsets[l] += lists[l].strides[d];
    }
    return to;
  }

  int64_t rows_at(const RowLookups::List& list, int64_t index) const {
    TORCH_CHECK_INDEX(index < list.length && index >= (from_end_ ? -list.length : 0), "index ",
                      index, " is out of range for a dimension of size ", list.length);
    return (index < 0 ? index + list.length : index) * list.step;
  }

  const RowLookups& lookups_;
  bool from_end_;
};

// --- on a device whose memory the host cannot read ---

// Calls visit(row without the indices' contribution, offsets) for each lookup, in order.
template <class Visit>
void visit_each(const RowLookups& lookups, size_t d, int64_t row, Offsets offsets,
                const Visit& visit) {
  if (d == lookups.sizes.size()) return visit(row, offsets);
  for (int64_t i = 0; i < lookups.sizes[d]; ++i, row += lookups.steps[d]) {
    visit_each(lookups, d + 1, row, offsets, visit);
    for (size_t l = 0; l < lookups.lists.size(); ++l) offsets[l] += lookups.lists[l].strides[d];
  }
}

// Computes the rows with ATen's ops, from a table that the host sends to the device. For each
// lookup, the table contains the row without the indices' contribution. For each lookup and each
// list, the table also contains the position of the index, the number of rows between consecutive
// indices, and the length of the indexed dimension.
Tensor positions_by_aten(const RowIndexing& indexing, BatchView& batch, at::IntArrayRef first,
                         int64_t width) {
  const AllLookups lookups(indexing, batch, first, width, IndexValues::Kind::kPositions);
  const int64_t count = lookups.count;
  const auto lists = static_cast<int64_t>(indexing.lists);
  const Tensor table = at::empty({1 + 3 * lists, count}, at::kLong);
  auto* to = table.mutable_data_ptr<int64_t>();
  for (const RowLookups& member : lookups.members) {
    const Offsets none(member.lists.size(), 0);
    visit_each(member, 0, member.first, none, [&](int64_t row, const Offsets& offsets) {
      to[0] = row;
      for (int64_t l = 0; l < lists; ++l) {
        const RowLookups::List& list = member.lists[l];
        to[(1 + 3 * l) * count] = values_of(list)[offsets[l]];
        to[(2 + 3 * l) * count] = list.step;
        to[(3 + 3 * l) * count] = list.length;
      }
      ++to;
    });
  }
  const auto known = to_device(table, batch.operand_value(0, 1).device).unbind();
  Tensor rows = known[0];
  for (int64_t l = 0; l < lists; ++l) {
    const Tensor &place = known[1 + 3 * l], &step = known[2 + 3 * l], &length = known[3 + 3 * l];
    const Tensor values = batch.flat(1 + static_cast<size_t>(l)).to(at::kLong).view({-1});
    const Tensor index = values.index_select(0, place);
    const Tensor whole = indexing.from_end ? at::where(index.lt(0), index + length, index) : index;
    // An index out of range must not refer to another member's row.
    const Tensor wrong = whole.lt(0).logical_or_(whole.ge(length));
    rows = (rows + whole * step).masked_fill_(wrong, cuda::kNoRow);
  }
  return rows;
}

Tensor positions_on_device(const RowIndexing& indexing, BatchView& batch, at::IntArrayRef first,
                           int64_t width) {
  const AllLookups lookups(indexing, batch, first, width, IndexValues::Kind::kInPlace);
  RowQuery query{lookups.members, {}, indexing.from_end};
  for (size_t l = 1; l <= indexing.lists; ++l) {
    query.types.push_back(batch.operand_value(0, l).dtype);
  }
  const auto options = at::TensorOptions(batch.operand_value(0, 1).device).dtype(at::kLong);
  const Tensor out = at::empty({lookups.count}, options);
  if (find_rows_on_device(query, out)) return out;
  return positions_by_aten(indexing, batch, first, width);
}

}  // namespace

int64_t row_width(const RowIndexing& indexing, const Geometry& x, const IndexGeometries& indices) {
  return product(x.sizes, least_leading_dims(indexing, x, indices), x.dim());
}

int64_t row_width(const RowIndexing& indexing, const BatchView& batch) {
  const auto width_of = [&](int64_t m) {
    return row_width(indexing, *batch.operand_value(m, 0).geometry,
                     index_geometries(indexing, batch, m));
  };
  const int64_t first = width_of(0);
  if (indexing.kind == Kind::kLists) return first;
  for (int64_t m = 1; m < batch.size(); ++m) {
    if (width_of(m) != first) return 1;
  }
  return first;
}

std::optional<std::vector<int64_t>> lookup_sizes(const RowIndexing& indexing, const Geometry& x,
                                                 const IndexGeometries& indices) {
  if (indexing.kind == Kind::kEach) {
    const Geometry& index = *indices[0];
    if (index.dim() != x.dim()) return std::nullopt;
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (d != indexing.dim && index.sizes[d] > x.sizes[d]) return std::nullopt;
    }
    return index.sizes;
  }
  const auto shape = broadcast(indices);
  const int64_t behind = indexing.dim + static_cast<int64_t>(indexing.lists);
  if (!shape.has_value() || behind > x.dim()) return std::nullopt;
  std::vector<int64_t> sizes(x.sizes.begin(), x.sizes.begin() + indexing.dim);
  sizes.insert(sizes.end(), shape->begin(), shape->end());
  sizes.insert(sizes.end(), x.sizes.begin() + behind, x.sizes.end());
  return sizes;
}

std::optional<RowIndexing> capture_index(NodeBuilder& builder, Kind kind, size_t dim,
                                         size_t index) {
  if (!builder.is_tensor(index)) return std::nullopt;
  const auto at = dim_of(builder.argument(dim), builder.operand_value(0).geometry->dim());
  if (!at.has_value() || !is_integral(builder.operand(index))) return std::nullopt;
  // The dimension may be negative, so its meaning depends on the rank of x.
  builder.key(static_cast<uint64_t>(builder.operand_value(0).geometry->dim()) << 32 |
              static_cast<uint64_t>(*at));
  builder.key(dtype_word(builder.operand_value(1)));
  return RowIndexing{kind, *at};
}

std::optional<RowIndexing> capture_list(NodeBuilder& builder, size_t argument) {
  const auto list = builder.argument(argument).toListRef();
  const auto given = [&](size_t e) { return !list[e].isNone() && list[e].toTensor().defined(); };
  size_t first = 0;
  while (first < list.size() && !given(first)) ++first;
  size_t last = first;
  for (; last < list.size() && given(last); ++last) {
    const Value index = builder.operand(argument, last);
    if (!is_integral(index)) return std::nullopt;
    builder.key(dtype_word(index));
  }
  for (size_t e = last; e < list.size(); ++e) {
    if (given(e)) return std::nullopt;
  }
  if (first == last) return std::nullopt;
  for (size_t e = 0; e < list.size(); ++e) {
    if (!given(e)) builder.absent(argument, e);
  }
  builder.key(first << 32 | (last - first));
  return RowIndexing{Kind::kLists, static_cast<int64_t>(first), last - first, true};
}

RowIndexing indexing_of(const BatchView& batch, Kind kind, size_t dim) {
  return {kind, *dim_of(batch.argument(dim), batch.operand_value(0, 0).geometry->dim())};
}

RowIndexing indexing_of_list(const BatchView& batch) {
  const auto& slots = batch.signature().slots;
  size_t lists = 1;
  while (lists + 1 < slots.size() && slots[lists + 1].argument == slots[1].argument &&
         batch.given(lists + 1)) {
    ++lists;
  }
  return {Kind::kLists, static_cast<int64_t>(slots[1].element), lists, true};
}

IndexGeometries index_geometries(const RowIndexing& indexing, const NodeBuilder& builder) {
  IndexGeometries out;
  for (size_t l = 1; l <= indexing.lists; ++l) out.push_back(builder.operand_value(l).geometry);
  return out;
}

IndexGeometries index_geometries(const RowIndexing& indexing, const BatchView& batch, int64_t m) {
  IndexGeometries out;
  for (size_t l = 1; l <= indexing.lists; ++l) out.push_back(batch.operand_value(m, l).geometry);
  return out;
}

Tensor row_positions(const RowIndexing& indexing, BatchView& batch, at::IntArrayRef first,
                     int64_t width) {
  const Value& index = batch.operand_value(0, 1);
  if (!has_host_memory(index.device)) return positions_on_device(indexing, batch, first, width);
  bool in_place = true;
  for (size_t l = 1; l <= indexing.lists; ++l) {
    in_place = in_place && batch.operand_value(0, l).dtype == at::kLong;
  }
  const AllLookups lookups(indexing, batch, first, width,
                           in_place ? IndexValues::Kind::kInPlace : IndexValues::Kind::kCopied);
  const Tensor out = at::empty({lookups.count}, at::kLong);
  int64_t* to = out.mutable_data_ptr<int64_t>();
  for (const RowLookups& member : lookups.members) {
    to = RowWriter(member, indexing.from_end).write(to);
  }
  return out;
}

}  // namespace autobatch

// Ops that write, add or reduce rows into a tensor of the instance, at positions that indices
// determine. Calls with different indices, numbers of indices or sizes of the indexed tensor can
// share a batch.
#include "autobatch/common/device_traits.h"
#include "autobatch/rules/row_positions.h"
#include "autobatch/rules/rowwise.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <algorithm>
#include <functional>
#include <string_view>

namespace autobatch {
namespace {

using at::Tensor;
using torch::jit::Stack;
using Kind = RowIndexing::Kind;

// The effect on a row that an index refers to.
enum class Effect : uint8_t { kAdd, kWrite, kReduce };

struct ScatterOp {
  const char* op;
  Kind kind;
  Effect effect;
  bool in_list = false;  // whether the indices are a list of tensors
};

// The arguments of the ops are (x, dim, index, source or a number, ...), or (x, indices, values,
// accumulate).
const ScatterOp kOps[] = {
    {"aten::index_add", Kind::kLists, Effect::kAdd},
    {"aten::index_copy", Kind::kLists, Effect::kWrite},
    {"aten::index_fill.int_Scalar", Kind::kLists, Effect::kWrite},
    {"aten::index_reduce", Kind::kLists, Effect::kReduce},
    {"aten::scatter_add", Kind::kEach, Effect::kAdd},
    {"aten::scatter.src", Kind::kEach, Effect::kWrite},
    {"aten::scatter.value", Kind::kEach, Effect::kWrite},
    {"aten::scatter.reduce", Kind::kEach, Effect::kReduce},
    {"aten::scatter.value_reduce", Kind::kEach, Effect::kReduce},
    {"aten::scatter_reduce.two", Kind::kEach, Effect::kReduce},
    {"aten::index_put", Kind::kLists, Effect::kWrite, true},
};

// --- functions that all rules of this file use ---

bool is_fill(const ScatterOp& entry) {
  return std::string_view(entry.op) == "aten::index_fill.int_Scalar";
}

// Whether eager's result has the strides of x. The results of all other ops are row-major.
bool is_laid_out_as_x(const ScatterOp& entry) { return entry.in_list || is_fill(entry); }

// Whether a source is valid although its sizes differ from the sizes of the lookups. index_put
// expands such a source. scatter reads only the first part of such a source.
bool fits_source(const ScatterOp& entry, at::IntArrayRef source, at::IntArrayRef sizes) {
  if (entry.in_list) {
    return at::is_expandable_to(source, sizes) && c10::multiply_integers(source) != 0;
  }
  if (entry.kind == Kind::kLists || source.size() != sizes.size()) return false;
  return std::ranges::equal(source, sizes, std::greater_equal());
}

// Captures a call. The operands are x, the indices, and the source if it is a tensor.
bool capture_call(NodeBuilder& builder, const ScatterOp& entry) {
  if (!builder.is_tensor(0)) return false;
  const Value x = builder.operand(0);
  if (is_laid_out_as_x(entry) && !row_major(x)) return false;
  const size_t source = entry.in_list ? 2 : 3;
  const auto indexing =
      entry.in_list ? capture_list(builder, 1) : capture_index(builder, entry.kind, 1, 2);
  if (!indexing.has_value()) return false;
  const IndexGeometries indices = index_geometries(*indexing, builder);
  const bool takes_int = entry.in_list || entry.effect != Effect::kWrite;
  for (size_t slot = 1; slot <= indexing->lists; ++slot) {
    const Value& index = builder.operand_value(slot);
    if (index.device != x.device) return false;
    if (index.dtype != at::kLong && (!takes_int || entry.kind == Kind::kEach)) return false;
    if (!entry.in_list && entry.kind == Kind::kLists && index.geometry->dim() != 1) return false;
  }
  const auto sizes = lookup_sizes(*indexing, *x.geometry, indices);
  if (!sizes.has_value()) return false;
  const int64_t width = row_width(*indexing, *x.geometry, indices);
  const bool nowhere = x.geometry->numel == 0 && c10::multiply_integers(*sizes) != 0;
  if (width == 0 || nowhere) return false;  // eager raises the error
  builder.key(dtype_word(x));
  builder.key(static_cast<uint64_t>(width));
  if (builder.argument(source).isTensor()) {
    const Value from = builder.operand(source);
    if (from.dtype != x.dtype || from.device != x.device) return false;
    const at::IntArrayRef own = from.geometry->sizes;
    if (own != at::IntArrayRef(*sizes) && !fits_source(entry, own, *sizes)) return false;
    // If the op reads only a part of the source, eager computes no gradient for the source. If the
    // op is also a reduction, eager computes no gradient at all.
    const bool in_part = entry.kind == Kind::kEach && own != at::IntArrayRef(*sizes);
    const bool reduces = entry.effect == Effect::kReduce && x.requires_grad;
    if (in_part && (from.requires_grad || reduces)) return false;
  }
  for (size_t i = source; i < builder.num_arguments(); ++i) {
    if (!builder.argument(i).isTensor() && !builder.constant(i)) return false;
  }
  builder.result(x.geometry->sizes, x.dtype);
  return true;
}

RowIndexing indexing_of(const BatchView& batch, const ScatterOp& entry) {
  if (entry.in_list) return indexing_of_list(batch);
  RowIndexing indexing = indexing_of(batch, entry.kind, 1);
  indexing.from_end = is_fill(entry);
  return indexing;
}

// Describes the concatenated rows of the tensors x of all members, and the positions of the rows
// that the indices refer to.
struct Rows {
  Rows(BatchView& batch, const ScatterOp& entry) {
    const RowIndexing indexing = indexing_of(batch, entry);
    width = row_width(indexing, batch);
    for (int64_t m = 0; m < batch.size(); ++m) {
      first.push_back(count);
      count += batch.operand_value(m, 0).geometry->numel / width;
    }
    positions = row_positions(indexing, batch, first, width);
    if (entry.in_list || batch.num_operands() == 3) source = batch.num_operands() - 1;
  }
  int64_t width = 1;
  int64_t count = 0;
  std::vector<int64_t> first;    // by member: index of the first row of its tensor x
  Tensor positions;              // by row of the source: the row of x that the op writes to
  std::optional<size_t> source;  // slot of the source operand
};

// The rows of a source operand. The op may expand the operand (index_put) or read only a part of it
// (scatter).
class Source {
 public:
  Source(const ScatterOp& entry, size_t slot) : entry_(entry), slot_(slot) {}

  // Whether the op reads the whole operand and does not expand it.
  bool is_whole(const BatchView& batch) const {
    if (entry_.kind == Kind::kLists && !entry_.in_list) return true;
    for (int64_t m = 0; m < batch.size(); ++m) {
      if (batch.operand_value(m, slot_).geometry->sizes != sizes(batch, m)) return false;
    }
    return true;
  }

  Tensor rows(BatchView& batch, int64_t width) const {
    if (is_whole(batch)) return batch.rows(slot_, width);
    std::vector<Tensor> rows;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Tensor own = region_view(batch.operand_region(m, slot_));
      rows.push_back(taken(own, sizes(batch, m)).reshape({-1, width}));
    }
    return at::cat(rows);
  }

  // Adds the gradient of the tensor that `rows` returned.
  void add(BackwardBatch& batch, const Tensor& rows) const {
    if (is_whole(batch)) return batch.add(slot_, rows);
    std::vector<Tensor> gradients;
    int64_t first = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const std::vector<int64_t> taken_sizes = sizes(batch, m);
      const int64_t count = c10::multiply_integers(taken_sizes) / rows.size(1);
      const Tensor part = rows.narrow(0, first, count).view(taken_sizes);
      const at::IntArrayRef own = batch.operand_value(m, slot_).geometry->sizes;
      gradients.push_back(to_whole(part, own).reshape(-1));
      first += count;
    }
    batch.add(slot_, at::cat(gradients));
  }

 private:
  std::vector<int64_t> sizes(const BatchView& batch, int64_t m) const {
    const RowIndexing indexing = indexing_of(batch, entry_);
    return *lookup_sizes(indexing, *batch.operand_value(m, 0).geometry,
                         index_geometries(indexing, batch, m));
  }

  Tensor taken(const Tensor& source, at::IntArrayRef sizes) const {
    if (entry_.in_list) return source.expand(sizes);
    Tensor part = source;
    for (size_t d = 0; d < sizes.size(); ++d)
      part = part.narrow(static_cast<int64_t>(d), 0, sizes[d]);
    return part;
  }

  Tensor to_whole(const Tensor& gradient, at::IntArrayRef source) const {
    if (entry_.in_list) return at::sum_to(gradient, source);
    const Tensor out = at::zeros(source, gradient.options());
    taken(out, gradient.sizes()).copy_(gradient);
    return out;
  }

  const ScatterOp& entry_;
  size_t slot_;
};

// --- additions and writes ---

class ScatterRule final : public Rule {
 public:
  explicit ScatterRule(const ScatterOp& entry) : entry_(entry) {}

  bool reads(size_t slot) const override { return entry_.in_list ? slot != 0 : slot == 1; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override { return capture_call(builder, entry_); }

  void forward(Batch& batch) const override {
    const Rows rows(batch, entry_);
    Tensor out = batch.output_rows(0, rows.width);
    out.copy_(batch.rows(0, rows.width));
    if (!rows.source.has_value()) {
      out.index_fill_(0, rows.positions, batch.argument(3).toScalar());
      return;
    }
    const Tensor source = Source(entry_, *rows.source).rows(batch, rows.width);
    if (!adds(batch)) {
      out.index_copy_(0, rows.positions, source);
    } else if (out.is_floating_point() || out.is_complex()) {
      index_add_rows(out, rows.positions, scaled(batch, source), -1);
    } else {
      out.index_add_(0, rows.positions, source, alpha(batch));
    }
  }

  void backward(BackwardBatch& batch) const override {
    const Rows rows(batch, entry_);
    const Tensor g = batch.grad_rows(0, rows.width);
    if (rows.source.has_value() && batch.needs(*rows.source)) {
      const Source source(entry_, *rows.source);
      if (source.is_whole(batch) && (!adds(batch) || alpha(batch).equal(1))) {
        batch.add_computed(*rows.source, {rows.positions.size(0), rows.width},
                           [&](Tensor& to) { at::index_select_out(to, g, 0, rows.positions); });
      } else {
        source.add(batch, scaled(batch, g.index_select(0, rows.positions)));
      }
    }
    if (!batch.needs(0)) return;
    if (adds(batch)) return batch.pass_on(0, g);
    batch.add(0, g.index_fill(0, rows.positions, 0));
  }

 private:
  bool adds(const BatchView& batch) const {
    return entry_.in_list ? batch.argument(3).toBool() : entry_.effect == Effect::kAdd;
  }
  static at::Scalar alpha(const BatchView& batch) {
    const auto& arguments = batch.signature().arguments;
    return arguments.size() > 4 ? arguments[4].toScalar() : at::Scalar(1);
  }
  Tensor scaled(const BatchView& batch, const Tensor& rows) const {
    if (!adds(batch) || alpha(batch).equal(1)) return rows;
    return rows * alpha(batch);
  }

  const ScatterOp& entry_;
};

// --- reductions ---

// Calls the op once on the rows of all members.
class ScatterReduceRule final : public RowsCall {
 public:
  explicit ScatterReduceRule(const ScatterOp& entry) : entry_(entry) {}

  bool infers() const override { return false; }
  bool capture(NodeBuilder& builder) const override {
    if (!capture_call(builder, entry_)) return false;
    // `scatter` with a reduction has no derivative.
    const bool differentiable =
        builder.op().name.find("reduce.two") != std::string::npos || entry_.kind == Kind::kLists;
    return differentiable || !builder.any_requires_grad();
  }

 protected:
  Tensor operand(BatchView& batch, size_t slot) const override {
    const int64_t width = row_width(indexing_of(batch, entry_), batch);
    // Rows of one element are passed as a vector, because some kernels support more dtypes for
    // vectors.
    const at::DimVector sizes = width == 1 ? at::DimVector{-1} : at::DimVector{-1, width};
    if (slot == 0) return batch.rows(0, width).reshape(sizes);
    if (slot == 2) return Source(entry_, 2).rows(batch, width).reshape(sizes);
    const Tensor positions = Rows(batch, entry_).positions;
    if (entry_.kind == Kind::kLists || width == 1) return positions;
    return positions.unsqueeze(1).expand(sizes);
  }

  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    if (slot == 0) return batch.add(0, grad);
    Source(entry_, slot).add(batch, grad.dim() == 1 ? grad.unsqueeze(1) : grad);
  }

  void adjust(const BatchView&, Stack& arguments) const override { arguments[1] = 0; }

 private:
  const ScatterOp& entry_;
};

// --- segments of given lengths ---

// The rule of segment_reduce(data, reduce, lengths, indices, offsets, axis, unsafe, initial), where
// `axis` is 0 and `lengths` is given. One call computes the results from the concatenated data and
// lengths of all members.
class SegmentReduceRule final : public RowsCall {
 public:
  bool infers() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !builder.is_tensor(2)) return false;
    if (builder.is_tensor(3) || builder.is_tensor(4) || builder.argument(5).toInt() != 0)
      return false;
    const Value data = builder.operand(0);
    const Value lengths = builder.operand(2);
    for (const size_t i : {3, 4}) builder.absent(i);
    if (!is_float(data) || data.geometry->dim() == 0 || !row_major(data)) return false;
    if (lengths.geometry->dim() != 1 || lengths.dtype != at::kLong) return false;
    if (!has_host_memory(data.device) || !has_host_memory(lengths.device)) return false;
    std::vector<int64_t> sizes = data.geometry->sizes;
    sizes[0] = lengths.geometry->numel;
    builder.key(dtype_word(data));
    builder.key(sizes.size());
    for (size_t d = 1; d < sizes.size(); ++d) {
      if (sizes[d] == 0) return false;
      builder.key(static_cast<uint64_t>(sizes[d]));
    }
    for (const size_t i : {1, 6, 7}) {
      if (!builder.constant(i)) return false;
    }
    builder.result(sizes, data.dtype);
    return true;
  }

 protected:
  Tensor operand(BatchView& batch, size_t slot) const override {
    if (slot == 1) return checked_lengths(batch);
    std::vector<int64_t> sizes = batch.operand_value(0, 0).geometry->sizes;
    sizes[0] = -1;
    return batch.rows(0, c10::multiply_integers(at::IntArrayRef(sizes).slice(1))).view(sizes);
  }

  void add_gradient(BackwardBatch& batch, size_t slot, const Tensor& grad) const override {
    batch.add(slot, grad);
  }

 private:
  // Checks the lengths of each member and returns the lengths of all members. The check is
  // necessary because the call for all members checks only the total. Without the check, the
  // lengths of one member could cover rows of another member.
  static Tensor checked_lengths(BatchView& batch) {
    const Tensor lengths = batch.flat(1);
    const int64_t* at = lengths.const_data_ptr<int64_t>();
    for (int64_t m = 0; m < batch.size(); ++m) {
      int64_t left = batch.operand_value(m, 0).geometry->sizes[0];
      for (int64_t i = batch.operand_value(m, 1).geometry->numel; i > 0; --i, ++at) {
        TORCH_CHECK(*at >= 0, "segment_reduce: a length is negative");
        left -= *at;
      }
      TORCH_CHECK(left == 0, "segment_reduce: the sum of the lengths is not the number of rows");
    }
    return lengths;
  }
};

}  // namespace

RuleTable scatter_rules() {
  RuleTable table{{"aten::segment_reduce", new SegmentReduceRule()}};
  for (const ScatterOp& entry : kOps) {
    if (entry.effect == Effect::kReduce) {
      table.push_back({entry.op, new ScatterReduceRule(entry)});
    } else {
      table.push_back({entry.op, new ScatterRule(entry)});
    }
  }
  return table;
}

}  // namespace autobatch

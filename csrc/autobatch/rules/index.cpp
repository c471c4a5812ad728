// Lookups by index. The signature contains neither the indices nor the number of indices. Therefore
// calls with different indices share a batch.
#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/segment_reduce.h"
#include "autobatch/rules/row_positions.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <map>
#include <unordered_map>

namespace autobatch {
namespace {

using at::Tensor;

// Whether eager raises an error for this weight, because the weight is complex and requires grad.
// If so, marks the call as one that eager must run.
bool refuses(NodeBuilder& builder, const Value& weight) {
  if (!weight.requires_grad || !at::isComplexType(weight.dtype)) return false;
  builder.leave_to_eager();
  return true;
}

// The rule of embedding(weight [V, D], indices [..], padding_idx, scale_grad_by_freq, sparse) ->
// [.., D].
class EmbeddingRule final : public Rule {
 public:
  bool reads(size_t slot) const override { return slot != 0; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (builder.argument(4).toBool()) return false;
    if (!builder.is_tensor(0) || !builder.is_tensor(1) || builder.is_computed(0)) return false;
    const Value w = builder.weight(0);
    const Value indices = builder.operand(1);
    if (refuses(builder, w)) return false;
    if (w.geometry->dim() != 2 || !w.geometry->contiguous || w.geometry->numel == 0) return false;
    if (indices.dtype != at::kLong && indices.dtype != at::kInt) return false;
    if (!builder.constant(2) || !builder.constant(3)) return false;
    builder.key(dtype_word(w));
    builder.key(dtype_word(indices));
    at::DimVector sizes(indices.geometry->sizes.begin(), indices.geometry->sizes.end());
    sizes.push_back(w.geometry->sizes[1]);
    builder.result(sizes, w.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Tensor w = batch.single(0);
    Tensor out = batch.output_rows(0, w.size(1));
    at::index_select_out(out, w, 0, batch.flat(1));
  }

  void backward(BackwardBatch& batch) const override {
    const Value& w = batch.operand_value(0, 0);
    const Tensor indices = batch.flat(1);
    Tensor g = batch.grad_rows(0, w.geometry->sizes[1]);
    if (batch.argument(3).toBool()) g = g * by_frequency(batch, indices).unsqueeze(1).to(g.dtype());
    batch.add_rows(0, indices, g, batch.argument(2).toInt());
  }

 private:
  // Used for scale_grad_by_freq. Returns 1 / n for each index, where n is the number of occurrences
  // of the index in the instance.
  static Tensor by_frequency(BackwardBatch& batch, const Tensor& indices) {
    const Tensor index = indices.to(at::kCPU, at::kLong).contiguous();
    const Tensor out = at::empty({index.numel()}, at::kDouble);
    const int64_t* at = index.const_data_ptr<int64_t>();
    double* to = out.mutable_data_ptr<double>();
    std::unordered_map<int64_t, int64_t> times;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const int64_t count = batch.operand_value(m, 1).geometry->numel;
      times.clear();
      for (int64_t i = 0; i < count; ++i) ++times[at[i]];
      for (int64_t i = 0; i < count; ++i) to[i] = 1.0 / static_cast<double>(times[at[i]]);
      at += count;
      to += count;
    }
    return out.to(indices.device());
  }
};

// --- rows of a tensor that belongs to the instance ---

// Looks up rows, for instances with any number of rows. The ops are index_select(x, dim, indices),
// x[:, i, j], gather(x, dim, indices), and embedding(x, indices, padding_idx) of a computed matrix.
class RowIndexRule final : public Rule {
 public:
  enum class Form : uint8_t { kSelect, kIndex, kEmbedding, kGather };
  explicit RowIndexRule(Form form) : form_(form) {}

  bool reads(size_t slot) const override { return slot != 0; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (form_ == Form::kEmbedding && refuses(builder, x)) return false;
    if (!row_major(x) || x.geometry->dim() == 0) return false;
    const std::optional<RowIndexing> indexing = captured(builder);
    if (!indexing.has_value()) return false;
    for (size_t slot = 1; slot <= indexing->lists; ++slot) {
      const Value& index = builder.operand_value(slot);
      if (index.dtype != at::kLong || index.device != x.device) return false;
      if (form_ != Form::kGather && !row_major(index)) return false;
      if (form_ == Form::kSelect && index.geometry->dim() > 1) return false;
    }
    const IndexGeometries indices = index_geometries(*indexing, builder);
    auto out = lookup_sizes(*indexing, *x.geometry, indices);
    if (!out.has_value()) return false;
    const int64_t width = row_width(*indexing, *x.geometry, indices);
    const bool nowhere = x.geometry->numel == 0 && c10::multiply_integers(*out) != 0;
    if (width == 0 || nowhere) return false;  // eager raises the error
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(width));
    if (form_ == Form::kSelect && indices[0]->dim() == 0) {
      out->insert(out->begin() + indexing->dim, 1);
    }
    builder.result(*out, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Sources sources(batch, indexing(batch));
    const int64_t width = sources.width;
    const Tensor rows = flat_of(RegionRows(sources.regions));
    Tensor out = batch.output_rows(0, width);
    at::index_select_out(out, rows.view({sources.rows, width}), 0, positions(batch, sources));
  }

  void backward(BackwardBatch& batch) const override {
    const Sources sources(batch, indexing(batch));
    Tensor g = batch.grad_rows(0, sources.width);
    const int64_t padding = form_ == Form::kEmbedding ? batch.argument(2).toInt() : -1;
    if (padding >= 0) g = g.masked_fill(batch.flat(1).eq(padding).unsqueeze(1), 0);
    const Tensor places = positions(batch, sources);
    Regions targets = sources.regions;
    for (size_t i = 0; i < targets.size(); ++i) {
      const ValueId id = sources.values[i];
      targets[i] = batch.wanted(id) ? batch.target_to_add(sources.readers[i], id)
                                    : Region{nullptr, 0, targets[i].geometry};
    }
    const bool fresh = targets[0].fresh;
    const bool like_first = std::ranges::all_of(
        targets, [&](const Region& to) { return to.buffer != nullptr && to.fresh == fresh; });
    const RegionRows located(targets);
    if (like_first && located.layout().consecutive && located.layout().numel > 0) {
      const Tensor there = consecutive_view(located).view({sources.rows, sources.width});
      return index_add_rows(there, places, g, -1, {}, fresh);
    }
    const Tensor rows = at::zeros({sources.rows, sources.width}, g.options());
    index_add_rows(rows, places, g, -1);
    scatter_add(rows, targets);
  }

 private:
  // The distinct tensors in which members look up rows. The rows of these tensors are concatenated.
  // `first` contains, for each member, the position of the first row of the tensor that the member
  // reads.
  struct Sources {
    Sources(const BatchView& batch, const RowIndexing& indexing)
        : width(row_width(indexing, batch)) {
      // By the value number and the offset of a tensor: the position of its first row.
      std::map<std::pair<ValueId, int64_t>, int64_t> known;
      for (int64_t m = 0; m < batch.size(); ++m) {
        const ValueId id = batch.operand(m, 0);
        const Region region = batch.region(m, id);
        const auto [found, is_new] = known.emplace(std::pair(id, region.offset), rows);
        if (is_new) {
          regions.push_back(region);
          values.push_back(id);
          readers.push_back(m);
          rows += region.geometry->numel / width;
        }
        first.push_back(found->second);
      }
    }
    Regions regions;
    std::vector<ValueId> values;
    std::vector<int64_t> readers;  // by region: the first member that reads the region
    std::vector<int64_t> first;    // by member: position of the first row of its tensor
    int64_t rows = 0, width = 1;
  };

  std::optional<RowIndexing> captured(NodeBuilder& builder) const {
    switch (form_) {
      case Form::kIndex:
        return capture_list(builder, 1);
      case Form::kSelect:
        return capture_index(builder, RowIndexing::Kind::kLists, 1, 2);
      case Form::kGather:
        return builder.argument(3).toBool()
                   ? std::nullopt
                   : capture_index(builder, RowIndexing::Kind::kEach, 1, 2);
      case Form::kEmbedding:
        break;
    }
    const bool by_frequency = builder.argument(3).toBool(), sparse = builder.argument(4).toBool();
    if (by_frequency || sparse || !builder.is_tensor(1)) return std::nullopt;
    if (builder.operand_value(0).geometry->dim() != 2 || !builder.constant(2)) return std::nullopt;
    builder.operand(1);
    return RowIndexing{};
  }

  RowIndexing indexing(const BatchView& batch) const {
    switch (form_) {
      case Form::kIndex:
        return indexing_of_list(batch);
      case Form::kSelect:
        return indexing_of(batch, RowIndexing::Kind::kLists, 1);
      case Form::kGather:
        return indexing_of(batch, RowIndexing::Kind::kEach, 1);
      case Form::kEmbedding:
        break;
    }
    return {};
  }

  // Returns the members' indices as positions in the concatenated rows of all sources.
  Tensor positions(BatchView& batch, const Sources& sources) const {
    return row_positions(indexing(batch), batch, sources.first, sources.width);
  }

  Form form_;
};

// The rule of one_hot(x, num_classes). The shape of the result is known only if the number of
// classes is given.
class OneHotRule final : public Rule {
 public:
  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    const int64_t classes = builder.argument(1).toInt();
    if (x.dtype != at::kLong || classes <= 0 || x.geometry->numel == 0 || !row_major(x)) {
      builder.leave_to_eager();
      return false;
    }
    builder.key(static_cast<uint64_t>(classes));
    at::DimVector sizes(x.geometry->sizes.begin(), x.geometry->sizes.end());
    sizes.push_back(classes);
    builder.result(sizes, at::kLong);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t classes = batch.argument(1).toInt();
    Tensor out = batch.output_rows(0, classes);
    out.copy_(at::one_hot(batch.flat(0), classes));
  }

  void backward(BackwardBatch&) const override {}
};

// --- bags ---

// The rule of embedding_bag(weight, indices, offsets, scale_grad_by_freq, mode, sparse,
// per_sample_weights, include_last_offset, padding_idx?) -> (bags, offset2bag, bag_size,
// max_indices).
class EmbeddingBagRule final : public Rule {
 public:
  bool reads(size_t slot) const override { return slot != 0; }
  bool reads_result(uint32_t k) const override { return k != 0; }

  bool capture(NodeBuilder& builder) const override {
    if (covers(builder)) return true;
    builder.leave_to_eager();  // Meta kernels return other shapes than eager
    return false;
  }

  void forward(Batch& batch) const override {
    const Bags bags(batch);
    const Tensor w = batch.single(0);
    const Tensor weights = batch.given(3) ? batch.flat(3) : Tensor();
    const auto [out, bag_of, sizes, largest] =
        at::_embedding_bag(w, batch.flat(1), bags.offsets, false, mode(batch), false, weights,
                           false, padding(batch.signature().arguments));
    batch.output(0).copy_(out.view({-1}));
    Tensor own_bag = batch.output(1);
    if (own_bag.numel() > 0) at::sub_out(own_bag, bag_of, bags.first_bag);
    batch.output(2).copy_(sizes);
    batch.output(3).copy_(largest.view({-1}));
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = batch.operand_value(0, 0).geometry->sizes[1];
    const Tensor g = batch.grad_rows(0, width);
    if (mode(batch) == kMax) return add_largest(batch, g);
    const Bags bags(batch);
    const Tensor indices = batch.flat(1);
    const int64_t skip = padding(batch.signature().arguments);
    Tensor rows =
        mode(batch) == kMean ? g / batch.result_flat(2).clamp_min(1).unsqueeze(1).to(g.dtype()) : g;
    rows = rows.index_select(0, bags.bag_of);
    if (batch.given(3) && batch.needs(3)) {
      const Tensor products = (rows * batch.single(0).index_select(0, indices)).sum(1);
      batch.add(3, products.masked_fill(indices.eq(skip), 0));
    }
    if (batch.given(3)) rows = rows * batch.flat(3).unsqueeze(1);
    batch.add_rows(0, indices, rows, skip);
  }

 private:
  static constexpr int64_t kSum = 0, kMean = 1, kMax = 2;

  static bool covers(NodeBuilder& builder) {
    for (size_t i = 0; i < 3; ++i) {
      if (!builder.is_tensor(i)) return false;
    }
    if (builder.is_computed(0)) return false;
    for (size_t i : {3, 5, 7}) {  // scale_grad_by_freq, sparse, include_last_offset
      if (builder.argument(i).toBool()) return false;
    }
    const Value w = builder.weight(0);
    const Value indices = builder.operand(1);
    const Value offsets = builder.operand(2);
    if (w.geometry->dim() != 2 || !w.geometry->contiguous || w.geometry->numel == 0) return false;
    if (!w.requires_grad || (w.dtype != at::kFloat && w.dtype != at::kDouble)) return false;
    for (const Value& list : {indices, offsets}) {
      if (list.dtype != at::kLong || list.geometry->dim() != 1) return false;
    }
    if (offsets.geometry->numel == 0 || !has_host_memory(builder.device())) return false;
    const int64_t mode = builder.argument(4).toInt();
    if (!builder.is_tensor(6)) {
      builder.absent(6);
    } else {
      const Value p = builder.operand(6);
      if (p.dtype != w.dtype || p.geometry->sizes != indices.geometry->sizes || mode != kSum) {
        return false;
      }
    }
    builder.key(dtype_word(w));
    builder.constant(4);
    for (size_t i = 8; i < builder.num_arguments(); ++i) builder.constant(i);
    const int64_t bags = offsets.geometry->numel;
    const bool fast = mode == kSum && w.dtype == at::kFloat && padding(builder.arguments()) < 0;
    builder.result({bags, w.geometry->sizes[1]}, w.dtype);
    builder.result({fast ? 0 : indices.geometry->numel}, at::kLong);
    builder.result({bags}, at::kLong);
    mode == kMax ? builder.result({bags, w.geometry->sizes[1]}, at::kLong)
                 : builder.result({bags}, at::kLong);
    return true;
  }

  static int64_t mode(const BatchView& batch) { return batch.argument(4).toInt(); }
  static int64_t padding(at::ArrayRef<c10::IValue> arguments) {
    return arguments.size() > 8 && arguments[8].isInt() ? arguments[8].toInt() : -1;
  }

  // The bags of all members, concatenated.
  struct Bags {
    explicit Bags(BatchView& batch) {
      const Tensor own = batch.flat(2);
      int64_t elements = 0, bags = 0;
      offsets = at::empty({own.numel()}, at::kLong);
      const int64_t* at = own.const_data_ptr<int64_t>();
      int64_t* to = offsets.mutable_data_ptr<int64_t>();
      std::vector<int64_t> of, first;
      for (int64_t m = 0; m < batch.size(); ++m) {
        const int64_t length = batch.operand_value(m, 1).geometry->numel;
        const int64_t count = batch.operand_value(m, 2).geometry->numel;
        TORCH_CHECK(*at == 0, "offsets[0] has to be 0");
        for (int64_t b = 0; b < count; ++b) {
          const int64_t end = b + 1 < count ? at[b + 1] : length;
          TORCH_CHECK(at[b] <= end && end <= length,
                      "offsets of embedding_bag decrease or exceed the number of indices");
          to[b] = elements + at[b];
          of.insert(of.end(), static_cast<size_t>(end - at[b]), bags + b);
          first.insert(first.end(), static_cast<size_t>(end - at[b]), bags);
        }
        at += count;
        to += count;
        bags += count;
        elements += length;
      }
      bag_of = at::tensor(of, at::kLong);
      first_bag = at::tensor(first, at::kLong);
    }
    Tensor offsets;
    Tensor bag_of;     // by index: number of the bag that contains the index
    Tensor first_bag;  // by index: number of the first bag of its member
  };

  // Used for mode max. Adds the gradient of each element of a bag to the row from which the element
  // was taken.
  static void add_largest(BackwardBatch& batch, const Tensor& g) {
    const int64_t width = g.size(1);
    const Tensor rows = batch.result_rows(3, width);
    const Tensor filled = batch.result_flat(2).ne(0).unsqueeze(1);
    const auto& sizes = batch.operand_value(0, 0).geometry->sizes;
    const Tensor gw = at::zeros(sizes, g.options());
    gw.scatter_add_(0, rows, g * filled);
    batch.add_single(0, gw);
  }
};

}  // namespace

const Rule& embedding_rule() {
  static const EmbeddingRule rule;
  return rule;
}

RuleTable index_rules() {
  using Form = RowIndexRule::Form;
  const Rule* bag = new EmbeddingBagRule();
  return {{"aten::embedding", &embedding_rule()},
          {"aten::embedding", new RowIndexRule(Form::kEmbedding)},
          {"aten::index_select", new RowIndexRule(Form::kSelect)},
          {"aten::index.Tensor", new RowIndexRule(Form::kIndex)},
          {"aten::gather", new RowIndexRule(Form::kGather)},
          {"aten::one_hot", new OneHotRule()},
          {"aten::embedding_bag", bag},
          {"aten::embedding_bag.padding_idx", bag}};
}

}  // namespace autobatch

// `_grouped_mm` of rows that are sorted by expert, with one weight for all instances. The rows of
// all instances are sorted together. One product for each expert is then sufficient.
#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/rules/linear.h"

#include <ATen/ATen.h>

#include <vector>

namespace autobatch {
namespace {

using at::Tensor;

constexpr size_t kRows = 0, kWeight = 1, kEnds = 2;  // argument and operand numbers
constexpr int64_t kAlignment = 16;  // bytes; in eager, strides must be multiples of this number

// The rows of all members, [R, ..], sorted by expert. Rows of a member after the last end of this
// member belong to no expert.
struct Sorted {
  Tensor order;                 // row indices in sorted order; undefined if rows are sorted
  std::vector<int64_t> counts;  // by expert: number of rows
  bool valid = true;            // false if some ends decrease or exceed the number of rows

  // `ends` is [members, experts]. It contains, for each member, the end of the rows of each expert.
  Sorted(const BatchView& batch, const Tensor& ends) {
    const int64_t members = ends.size(0), experts = ends.size(1);
    const Tensor dense = ends.contiguous();
    const int32_t* data = dense.const_data_ptr<int32_t>();
    std::vector<int64_t> firsts{0};
    for (int64_t m = 0; m < members; ++m) {
      firsts.push_back(firsts.back() + batch.operand_value(m, kRows).geometry->sizes[0]);
    }
    std::vector<int64_t> rows;
    rows.reserve(static_cast<size_t>(firsts.back()));
    for (int64_t e = 0; e < experts; ++e) {
      const size_t before = rows.size();
      for (int64_t m = 0; m < members; ++m) {
        const int32_t* of = data + m * experts;
        const int64_t from = e == 0 ? 0 : of[e - 1];
        const int64_t all = firsts[static_cast<size_t>(m) + 1] - firsts[static_cast<size_t>(m)];
        valid = valid && from <= of[e] && of[e] <= all;
        for (int64_t row = from; valid && row < of[e]; ++row) {
          rows.push_back(firsts[static_cast<size_t>(m)] + row);
        }
      }
      counts.push_back(static_cast<int64_t>(rows.size() - before));
    }
    if (members == 1 && static_cast<int64_t>(rows.size()) == firsts.back()) return;
    order = at::tensor(rows, at::kLong);
  }

  Tensor sort(const Tensor& rows) const {
    return order.defined() ? rows.index_select(0, order) : rows;
  }

  // Calls f(expert, first row, number of rows) for each expert that has rows. The first row is an
  // index into the sorted rows.
  template <class F>
  void each(const F& f) const {
    int64_t first = 0;
    for (size_t e = 0; e < counts.size(); first += counts[e++]) {
      if (counts[e] > 0) f(static_cast<int64_t>(e), first, counts[e]);
    }
  }

  // Multiplies each row by its expert's matrix.
  void multiply(const Tensor& rows, const Tensor& matrices, Tensor out) const {
    const Tensor from = sort(rows);
    Tensor to = order.defined() ? pooled_empty({from.size(0), out.size(1)}, out.options()) : out;
    each([&](int64_t e, int64_t first, int64_t count) {
      Tensor part = to.narrow(0, first, count);
      at::mm_out(part, from.narrow(0, first, count), matrices[e]);
    });
    if (!order.defined()) return;
    if (order.size(0) < out.size(0)) out.zero_();
    out.index_copy_(0, order, to);
  }
};

class GroupedMatmulRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    for (const size_t i : {kRows, kWeight, kEnds}) {
      if (!builder.is_tensor(i)) return false;
    }
    if (builder.is_tensor(3) || !builder.argument(4).isNone()) return false;  // bias, dtype
    if (builder.is_computed(kWeight)) return false;
    const Value x = builder.operand(kRows);
    const Value w = builder.weight(kWeight);
    const Value ends = builder.operand(kEnds);
    const auto &a = x.geometry->sizes, &b = w.geometry->sizes;
    if (!has_host_memory(x.device) || x.dtype != at::kFloat || w.dtype != at::kFloat) return false;
    if (a.size() != 2 || b.size() != 3 || a[1] != b[1] || x.geometry->numel == 0) return false;
    if (ends.dtype != at::kInt || ends.geometry->sizes != std::vector<int64_t>{b[0]}) return false;
    if (!row_major(x) || !is_aligned(a[1]) || !is_aligned(b[2]) || b[2] == 0) return false;
    const auto& strides = w.geometry->strides;
    const bool rows = strides[2] == 1 && strides[1] == b[2],
               columns = strides[1] == 1 && strides[2] == b[1];
    if (!rows && !columns) return false;
    builder.key(dtype_word(x));
    builder.result({a[0], b[2]}, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Tensor w = batch.single(kWeight);
    const Tensor x = batch.rows(kRows, w.size(1));
    const Tensor out = batch.output_rows(0, w.size(2));
    const Tensor ends = batch.stacked(kEnds);
    const Sorted sorted(batch, ends);
    sorted.valid ? sorted.multiply(x, w, out) : run_each(batch, x, w, ends, out);
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor w = batch.single(kWeight);
    const Tensor g = batch.grad_rows(0, w.size(2));
    const Sorted sorted(batch, batch.stacked(kEnds));
    TORCH_CHECK(
        sorted.valid,
        "torch_autobatch: the offsets (`offs`) of _grouped_mm decrease or exceed the number "
        "of rows, so the gradient is not defined");
    if (batch.needs(kRows)) {
      Tensor of_rows = pooled_empty({g.size(0), w.size(1)}, g.options());
      sorted.multiply(g, w.mT(), of_rows);
      batch.add(kRows, std::move(of_rows));
    }
    if (!batch.needs(kWeight)) return;
    const Tensor x = sorted.sort(batch.rows(kRows, w.size(1))), of_result = sorted.sort(g);
    const Tensor of_weight = at::zeros(w.sizes(), w.options());
    sorted.each([&](int64_t e, int64_t first, int64_t count) {
      Tensor part = of_weight[e];
      at::mm_out(part, x.narrow(0, first, count).t(), of_result.narrow(0, first, count));
    });
    batch.add_single(kWeight, of_weight);
  }

 private:
  static bool is_aligned(int64_t width) {
    return width * static_cast<int64_t>(sizeof(float)) % kAlignment == 0;
  }

  // Calls eager's op for each member. Used if the ends are invalid, so that eager raises the error.
  static void run_each(const Batch& batch, const Tensor& x, const Tensor& w, const Tensor& ends,
                       const Tensor& out) {
    int64_t first = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const int64_t count = batch.operand_value(m, kRows).geometry->sizes[0];
      out.narrow(0, first, count).copy_(at::_grouped_mm(x.narrow(0, first, count), w, ends[m]));
      first += count;
    }
  }
};

}  // namespace

const Rule& grouped_mm_rule() {
  static const auto* rule = new GroupedMatmulRule();
  return *rule;
}

}  // namespace autobatch

// The rules of tril and triu, for matrices of any size.
#include "autobatch/common/device_traits.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace autobatch {
namespace {

using at::Tensor;

// The columns of a row that the op keeps: [begin, end).
struct Kept {
  int64_t begin, end;
};

// tril(x [..., n, m], diagonal) and triu(x, diagonal) return a row-major copy of x with zeros above
// or below the diagonal.
class TriangleRule final : public Rule {
 public:
  explicit TriangleRule(bool is_upper) : is_upper_(is_upper) {}

  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0)) return false;
    const Value x = builder.operand(0);
    if (x.geometry->dim() < 2) return false;
    builder.key(dtype_word(x));
    if (!builder.constant(1)) return false;
    builder.result(x.geometry->sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override { run(batch, batch.flat(0), batch.output(0)); }

  void backward(BackwardBatch& batch) const override {
    const Tensor g = batch.grad_flat(0);
    Tensor kept = at::empty_like(g);
    run(batch, g, kept);
    batch.add(0, std::move(kept));
  }

 private:
  // Copies the members' triangles from `from` to `to`. Both tensors contain the elements of one
  // member after another.
  void run(const BatchView& batch, const Tensor& from, const Tensor& to) const {
    const int64_t diagonal = batch.argument(1).toInt();
    int64_t start = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Geometry& g = *batch.result_value(m, 0).geometry;
      if (g.numel == 0) continue;
      const int64_t rows = g.sizes[g.sizes.size() - 2], columns = g.sizes.back();
      if (has_host_memory(from.device())) {
        copy_rows(from, to, start, g.numel / columns, rows, columns, diagonal);
      } else {
        const Tensor source = from.narrow(0, start, g.numel).view({-1, rows, columns});
        Tensor target = to.narrow(0, start, g.numel).view({-1, rows, columns});
        is_upper_ ? at::triu_out(target, source, diagonal) : at::tril_out(target, source, diagonal);
      }
      start += g.numel;
    }
  }

  void copy_rows(const Tensor& from, const Tensor& to, int64_t start, int64_t count, int64_t rows,
                 int64_t columns, int64_t diagonal) const {
    const auto item = static_cast<size_t>(from.element_size());
    const auto* source = static_cast<const char*>(from.const_data_ptr()) + start * item;
    auto* target = static_cast<char*>(to.mutable_data_ptr()) + start * item;
    for (int64_t r = 0; r < count; ++r) {
      const Kept kept = kept_in(r % rows, columns, diagonal);
      std::memset(target, 0, static_cast<size_t>(columns) * item);
      std::memcpy(target + kept.begin * item, source + kept.begin * item,
                  static_cast<size_t>(kept.end - kept.begin) * item);
      source += columns * item;
      target += columns * item;
    }
  }

  Kept kept_in(int64_t row, int64_t columns, int64_t diagonal) const {
    if (is_upper_) return {std::clamp<int64_t>(row + diagonal, 0, columns), columns};
    return {0, std::clamp<int64_t>(row + diagonal + 1, 0, columns)};
  }

  bool is_upper_;
};

}  // namespace

RuleTable triangle_rules() {
  return {{"aten::tril", new TriangleRule(false)}, {"aten::triu", new TriangleRule(true)}};
}

}  // namespace autobatch

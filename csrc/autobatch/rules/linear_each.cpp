// Products of any number of rows with a matrix that belongs to the instance, such as a weight after
// a step of gradient descent. Instances with similar numbers of rows are padded with zeros to the
// same number of rows. One batched product then computes the results of these instances.
#include "autobatch/common/pool.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/rules/by_shape.h"
#include "autobatch/rules/linear.h"
#include "autobatch/rules/rowwise.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

using at::Tensor;

// Members that are padded to the same number of rows. `longest` is this number. It is the largest
// number of rows of any of these members. Each member has more than longest / 2 rows without the
// padding.
struct Padded {
  Members members;
  std::vector<int64_t> firsts;  // by member: index of its first row in the batch
  Counts counts;
  int64_t longest = 0;

  bool uniform() const {
    return static_cast<int64_t>(counts.size()) * longest ==
           std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }

  // Returns two regions for each member: the region of the member's rows in `rows`, the rows of the
  // batch [.., width], and the region of the same rows in `padded` [n, longest, width].
  std::pair<Regions, Regions> parts(const Tensor& rows, const Tensor& padded,
                                    GeometryTable& geometries) const {
    const int64_t width = rows.size(1);
    std::pair<Regions, Regions> found;
    for (size_t i = 0; i < members.size(); ++i) {
      const Geometry* part = geometries.intern_contiguous({counts[i], width});
      found.first.push_back({&rows, firsts[i] * width, part});
      found.second.push_back({&padded, static_cast<int64_t>(i) * longest * width, part});
    }
    return found;
  }

  // Returns the members' rows, padded with zeros, as [n, longest, width].
  Tensor of(const Tensor& rows) const {
    const at::DimVector sizes{static_cast<int64_t>(members.size()), longest, rows.size(1)};
    if (uniform() && rows.size(0) == sizes[0] * longest) return rows.view(sizes);
    Tensor out = pooled_empty(sizes, rows.options());
    if (!uniform()) out.zero_();
    GeometryTable geometries;
    const auto [from, to] = parts(rows, out, geometries);
    copy_regions(from, to);
    return out;
  }

  // Copies the members' parts of `padded` [n, longest, width] into the batch's rows.
  void put(const Tensor& padded, const Tensor& rows) const {
    const Tensor from = padded.contiguous();
    GeometryTable geometries;
    const auto [to, source] = parts(rows, from, geometries);
    copy_regions(source, to);
  }
};

class LinearEachRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads(size_t slot) const override { return slot != 2; }
  bool reads_result(uint32_t) const override { return false; }
  bool gains_if_shared(size_t slot) const override { return slot > 0; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !builder.is_tensor(1)) return false;
    const Value x = builder.operand(0);
    const Value w = builder.operand(1);
    const auto& sizes = x.geometry->sizes;
    if (sizes.empty() || w.geometry->dim() != 2 || x.geometry->numel == 0) return false;
    const int64_t width = w.geometry->sizes[0];
    if (sizes.back() != w.geometry->sizes[1] || width == 0) return false;
    if (x.dtype != w.dtype || !is_float(x) || !row_major(x)) return false;
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(width));
    builder.key(static_cast<uint64_t>(sizes.back()));
    if (builder.is_tensor(2)) {
      const Value bias = builder.operand(2);
      if (bias.dtype != x.dtype || bias.geometry->sizes != std::vector<int64_t>{width})
        return false;
    } else {
      builder.absent(2);
    }
    at::DimVector out(sizes.begin(), sizes.end());
    out.back() = width;
    builder.result(out, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Tensor x = batch.rows(0, width(batch.operand_value(0, 0)));
    Tensor out = batch.output_rows(0, width(batch.result_value(0, 0)));
    if (has_one_matrix(batch)) {
      const Tensor bias = batch.given(2) ? batch.single(2) : Tensor();
      return multiply_into(out, x, batch.single(1).t(), nullptr, bias);
    }
    for (const Padded& group : groups(batch)) {
      const Tensor left = group.of(x);
      const Tensor right = stacked_of(batch, 1, group.members).mT();
      group.put(batch.given(2)
                    ? at::baddbmm(stacked_of(batch, 2, group.members).unsqueeze(1), left, right)
                    : at::bmm(left, right),
                out);
    }
  }

  void backward(BackwardBatch& batch) const override {
    const bool of_x = batch.needs(0), of_w = batch.needs(1);
    const bool of_bias = batch.given(2) && batch.needs(2);
    const int64_t in = width(batch.operand_value(0, 0));
    const Tensor g = batch.grad_rows(0, width(batch.result_value(0, 0)));
    const Tensor x = of_w ? batch.rows(0, in) : Tensor();
    if (has_one_matrix(batch)) {
      if (of_x) {
        batch.add_computed(0, {g.size(0), in},
                           [&](Tensor& to) { multiply_into(to, g, batch.single(1), nullptr); });
      }
      if (of_w) batch.add_product(1, g, x);
      if (of_bias) batch.add_product(2, g, Tensor());
      return;
    }
    Tensor gradient = of_x ? pooled_empty({g.size(0), in}, g.options()) : Tensor();
    for (const Padded& group : groups(batch)) {
      const Tensor of_result = group.of(g);
      if (of_x) group.put(at::bmm(of_result, stacked_of(batch, 1, group.members)), gradient);
      if (of_w) add_gradients(batch, 1, group.members, at::bmm(of_result.mT(), group.of(x)));
      if (of_bias) add_gradients(batch, 2, group.members, of_result.sum(1));
    }
    if (of_x) batch.add(0, std::move(gradient));
  }

 private:
  // Whether all members have the same matrix and bias. If so, one product computes all rows.
  static bool has_one_matrix(BatchView& batch) {
    return batch.shared(1) && (!batch.given(2) || batch.shared(2));
  }

  static int64_t width(const Value& value) { return value.geometry->sizes.back(); }

  // Groups members whose numbers of rows have the same bit width. Less than half of the padded rows
  // are then padding.
  static std::vector<Padded> groups(const BatchView& batch) {
    std::map<int, Padded> by_length;
    int64_t first = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Value& x = batch.operand_value(m, 0);
      const int64_t count = x.geometry->numel / width(x);
      Padded& group = by_length[std::bit_width(static_cast<uint64_t>(count))];
      group.members.push_back(m);
      group.firsts.push_back(first);
      group.counts.push_back(count);
      group.longest = std::max(group.longest, count);
      first += count;
    }
    std::vector<Padded> groups;
    for (auto& [length, group] : by_length) groups.push_back(std::move(group));
    return groups;
  }
};

}  // namespace

const Rule& linear_each_rule() {
  static const auto* rule = new LinearEachRule;
  return *rule;
}

}  // namespace autobatch

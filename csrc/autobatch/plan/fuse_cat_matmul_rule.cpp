// The rule for W [A; B] = W1 A + W2 B (fuse_cat_matmul.h), with the kernel for small matrices.
#include "autobatch/common/pool.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/plan/fuse_cat_matmul.h"
#include "autobatch/rules/rule.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>

#include <vector>

namespace autobatch {
namespace {

using at::Tensor;

// Number of members whose terms of the weight's gradient are summed in one step. The transposed
// gradients of these members stay in cache.
constexpr int64_t kMembers = 64;

// A matrix whose rows are `step` elements apart in memory.
struct Rows {
  const float* data;
  int64_t step;
};

Rows rows_of(const Region& region) {
  return {region.buffer->const_data_ptr<float>() + region.offset, region.geometry->strides[0]};
}
int64_t height_of(const Region& region) { return region.geometry->sizes[0]; }

class CatProductRule final : public Rule {
 public:
  bool heavy() const override { return true; }
  bool reads_result(uint32_t) const override { return false; }
  bool copies_regions() const override { return true; }
  bool capture(NodeBuilder&) const override { return false; }  // only the pass adds such nodes

  void forward(Batch& batch) const override {
    const Region w = batch.operand_region(0, 0);
    std::vector<MultiplyBlock> products;
    for (int64_t member = 0; member < batch.size(); ++member) {
      const Region out = batch.result_region(member, 0);
      Rows part = rows_of(w);  // the columns of W for the next piece
      bool adds = false;
      for (const ValueId id : pieces(batch, member)) {
        const Region piece = batch.region(member, id);
        products.push_back(product(part, height_of(piece), rows_of(piece), out, adds));
        part.data += height_of(piece);
        adds = true;
      }
    }
    run_small_products(products, /*disjoint=*/true);
  }

  void backward(BackwardBatch& batch) const override {
    add_to_pieces(batch);
    if (batch.needs(0)) add_to_weight(batch);
  }

  std::vector<Tensor> eager(const Signature&, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor>) const override {
    return {at::matmul(operands[0], at::cat(operands.slice(1)))};
  }

 private:
  static at::ArrayRef<ValueId> pieces(const BatchView& batch, int64_t member) {
    return batch.tape().operands_of(batch.node(member)).slice(1);
  }

  // Describes the product out = x matrix, or out += x matrix if `adds` is true.
  static MultiplyBlock product(const Rows& x, int64_t depth, const Rows& matrix, const Region& out,
                               bool adds) {
    const Geometry& g = *out.geometry;
    return {x.data,     matrix.data, out.buffer->mutable_data_ptr<float>() + out.offset,
            g.sizes[0], depth,       g.sizes[1],
            x.step,     matrix.step, g.strides[0],
            adds,       depth};
  }

  // Adds W1^T G to the gradient of the first piece, W2^T G to the gradient of the second piece, and
  // so on. The additions run in sequence, because the same value may occur as several pieces.
  static void add_to_pieces(BackwardBatch& batch) {
    const Tensor turned = region_view(batch.operand_region(0, 0)).t().contiguous();
    const int64_t m = turned.size(1);
    std::vector<MultiplyBlock> products;
    for (int64_t member = 0; member < batch.size(); ++member) {
      const Rows g = rows_of(batch.grad_region(member, 0));
      Rows part{turned.const_data_ptr<float>(), m};
      for (const ValueId id : pieces(batch, member)) {
        const int64_t k = batch.tape().values[id].geometry->sizes[0];
        if (batch.wanted(id)) {
          const Region to = batch.target_to_add(member, id);
          products.push_back(product(part, m, g, to, !to.fresh));
        }
        part.data += k * m;
      }
    }
    run_small_products(products, /*disjoint=*/false);
  }

  // Adds up the transpose of W's gradient, [A G^T; B G^T], over all members. Only G has to be
  // transposed, and only once for all pieces of a member.
  static void add_to_weight(BackwardBatch& batch) {
    const Geometry& w = *batch.operand_value(0, 0).geometry;
    const int64_t m = w.sizes[0], k = w.sizes[1];
    const int64_t n = batch.result_value(0, 0).geometry->sizes[1];
    const auto options = batch.operand_value(0, 0).options();
    const Tensor sum = pooled_zeros(k * m, options);
    const Tensor turned = pooled_empty(kMembers * m * n, options);
    for (int64_t first = 0; first < batch.size(); first += kMembers) {
      std::vector<MultiplyBlock> products;
      auto* g_turned = turned.mutable_data_ptr<float>();
      for (int64_t i = first; i < std::min(first + kMembers, batch.size());
           ++i, g_turned += m * n) {
        const Rows g = rows_of(batch.grad_region(i, 0));
        cpu_kernels()->turn(g.data, g.step, m, n, g_turned, m);
        auto* part = sum.mutable_data_ptr<float>();
        for (const ValueId id : pieces(batch, i)) {
          const Region piece = batch.region(i, id);
          const Rows rows = rows_of(piece);
          products.push_back(
              {rows.data, g_turned, part, height_of(piece), n, m, rows.step, m, m, true, n});
          part += height_of(piece) * m;
        }
      }
      run_small_products(products, /*disjoint=*/false);
    }
    batch.add_single(0, sum.view({k, m}).t());
  }
};

}  // namespace

const Rule& cat_product_rule() {
  static const CatProductRule rule;
  return rule;
}

}  // namespace autobatch

// The rules of fused chains and trees of additions (fuse_sums.h).
#include "autobatch/kernels/segment_reduce.h"
#include "autobatch/plan/fuse_sums.h"
#include "autobatch/rules/rule.h"

#include <ATen/ops/add.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>

#include <memory>

namespace autobatch {
namespace {

using at::Tensor;

// A sum of any number of terms. Each member has terms of one size. If all members have terms of the
// same size, the terms are added pairwise, by recursive halving. Otherwise the terms are added in
// order.
class SumRule final : public Rule {
 public:
  bool saves() const override { return false; }
  bool capture(NodeBuilder&) const override { return false; }  // only the pass adds such nodes

  void forward(Batch& batch) const override {
    Regions terms;
    Counts counts;
    bool same_size = true;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const auto operands = batch.tape().operands_of(batch.node(m));
      counts.push_back(static_cast<int64_t>(operands.size()));
      for (ValueId id : operands) terms.push_back(batch.region(m, id));
      same_size &= terms.back().geometry->numel == terms.front().geometry->numel;
    }
    if (same_size) {
      add_rows(batch, std::move(terms), counts);
    } else {
      add_in_turn(batch, terms, counts);
    }
  }

  void backward(BackwardBatch& batch) const override {
    Regions from, to;
    for (int64_t m = 0; m < batch.size(); ++m) {
      for (ValueId id : batch.tape().operands_of(batch.node(m))) {
        if (!batch.wanted(id)) continue;
        from.push_back(batch.grad_region(m, 0));
        to.push_back(batch.target_to_add(m, id));
      }
    }
    add_regions(from, to);
  }

  std::vector<Tensor> eager(const Signature&, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor>) const override {
    Tensor sum = operands[0];
    for (const Tensor& term : operands.slice(1)) sum = sum + term;
    return {sum};
  }

 private:
  // Adds terms that all have one size, as rows of a matrix.
  static void add_rows(Batch& batch, Regions terms, const Counts& counts) {
    const int64_t width = terms.front().geometry->numel;
    Tensor out = batch.output_rows(0, width);
    const auto count = static_cast<int64_t>(terms.size());
    const Tensor rows = flat_of(RegionRows(std::move(terms)));
    segment_sum(rows.view({count, width}), counts, out);
  }

  // Adds terms whose sizes differ between members. Copies the first terms of all members to the
  // results, then adds the second terms of all members, then the third terms, and so on.
  static void add_in_turn(Batch& batch, const Regions& terms, const Counts& counts) {
    Regions from, to;
    for (int64_t turn = 0; turn == 0 || !from.empty(); ++turn) {
      from.clear();
      to.clear();
      int64_t first = 0;
      for (int64_t m = 0; m < batch.size(); first += counts[static_cast<size_t>(m++)]) {
        if (turn >= counts[static_cast<size_t>(m)]) continue;
        from.push_back(terms[static_cast<size_t>(first + turn)]);
        to.push_back(batch.result_region(m, 0));
      }
      if (turn == 0) {
        copy_regions(from, to);
      } else {
        add_regions(from, to);
      }
    }
  }
};

// A sum of terms embedding(matrix, indices). Operand 0 is the matrix, and the other operands are
// the indices of the terms. The signature's arguments are the arguments of embedding(weight,
// indices, padding_idx, scale_grad_by_freq, sparse).
class LookupSumRule final : public Rule {
 public:
  bool reads(size_t slot) const override { return slot != 0; }
  bool reads_result(uint32_t) const override { return false; }
  bool capture(NodeBuilder&) const override { return false; }  // only the pass adds such nodes

  void forward(Batch& batch) const override {
    const Tensor matrix = batch.single(0);
    const auto terms = std::make_shared<Terms>(batch);
    Tensor out = batch.output_rows(0, matrix.size(1));
    segment_sum_of(matrix, terms->indices, terms->counts, terms->rows, out);
    if (batch.needs_grad()) batch.record().kept = terms;
  }

  void backward(BackwardBatch& batch) const override {
    auto terms = std::static_pointer_cast<const Terms>(batch.record().kept);
    if (!batch.complete() || terms == nullptr) terms = std::make_shared<const Terms>(batch);
    const int64_t width = batch.operand_value(0, 0).geometry->sizes[1];
    batch.add_rows(0, terms->indices, batch.grad_rows(0, width), batch.argument(2).toInt(),
                   terms->counts);
  }

  std::vector<Tensor> eager(const Signature& signature, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor>) const override {
    const auto term = [&](size_t i) {
      return at::embedding(operands[0], operands[i], signature.arguments[2].toInt());
    };
    Tensor sum = term(1);
    for (size_t i = 2; i < operands.size(); ++i) sum = sum + term(i);
    return {sum};
  }

 private:
  // The concatenated indices of all terms of all members.
  struct Terms {
    explicit Terms(const BatchView& batch) {
      Regions each;
      each.reserve(batch.num_operands() * static_cast<size_t>(batch.size()));
      for (int64_t m = 0; m < batch.size(); ++m) {
        const auto operands = batch.tape().operands_of(batch.node(m));
        counts.push_back(static_cast<int64_t>(operands.size()) - 1);
        for (ValueId id : operands.slice(1)) each.push_back(batch.region(m, id));
      }
      rows = each.front().geometry->numel;
      indices =
          at::empty({rows * static_cast<int64_t>(each.size())}, each.front().buffer->options());
      gather_into(each, indices);
    }
    Tensor indices;
    Counts counts;     // for each member: number of terms
    int64_t rows = 0;  // number of rows that each term looks up
  };
};

}  // namespace

const Rule& sum_rule() {
  static const SumRule rule;
  return rule;
}

const Rule& lookup_sum_rule() {
  static const LookupSumRule rule;
  return rule;
}

bool sums_lookups(const Signature& signature) {
  return signature.rule == &embedding_rule() && !signature.arguments[3].toBool();
}

}  // namespace autobatch

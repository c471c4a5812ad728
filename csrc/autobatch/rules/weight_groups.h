// Batches whose members differ in their weights: the members stand weight by weight, and there is
// one call for each weight. Which batches are joined so: merge_by_weight.h.
#pragma once

#include "autobatch/rules/backward_batch.h"
#include "autobatch/rules/batch.h"

#include <cstdint>
#include <vector>

namespace autobatch {

// A rule that runs members with different weights as one batch.
class WeightGroups {
 public:
  // Whether two nodes of the rule may be in one batch, though they are of different signatures.
  virtual bool may_join(const Tape& tape, const Node& a, const Node& b) const = 0;

 protected:
  ~WeightGroups() = default;
};

// Members of a batch that share their weights, [first, first + count), and their rows.
struct WeightGroup {
  int64_t first, count;
  int64_t first_row, rows;

  at::Tensor of(const at::Tensor& all_rows) const { return all_rows.narrow(0, first_row, rows); }
};
// `width`: elements of a row of the operand at `slot`.
std::vector<WeightGroup> weight_groups(const BatchView& batch, size_t slot, int64_t width);
// Whether all members share their weights. Those of one weight stand together.
inline bool is_one_group(const BatchView& batch) {
  return batch.node(0).signature == batch.node(batch.size() - 1).signature;
}

// The members of one group.
Regions regions_of_group(const BatchView& batch, size_t slot, const WeightGroup& group);
BackwardBatch part_of_group(BackwardBatch& batch, const WeightGroup& group,
                            std::vector<NodeId>& members);

}  // namespace autobatch

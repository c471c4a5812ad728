// Runs batches whose members have different weights. The members of a batch are sorted by weight,
// and the rule makes one call for each weight. The functions in merge_by_weight.h decide which
// batches are merged into one.
#pragma once

#include "autobatch/rules/backward_batch.h"
#include "autobatch/rules/batch.h"

#include <cstdint>
#include <vector>

namespace autobatch {

// Base class of a rule that can run members with different weights as one batch.
class WeightGroups {
 public:
  // Whether two nodes of the rule with different signatures may be in one batch.
  virtual bool may_join(const Tape& tape, const Node& a, const Node& b) const = 0;

 protected:
  ~WeightGroups() = default;
};

// The members [first, first + count) of a batch, and the rows of these members. These members have
// the same weights.
struct WeightGroup {
  int64_t first, count;
  int64_t first_row, rows;

  at::Tensor of(const at::Tensor& all_rows) const { return all_rows.narrow(0, first_row, rows); }
};
// Returns the groups of the batch. `width`: number of elements in a row of the operand at `slot`.
std::vector<WeightGroup> weight_groups(const BatchView& batch, size_t slot, int64_t width);
// Whether all members have the same weights. It is enough to compare the first member with the last
// member, because members are sorted by weight.
inline bool is_one_group(const BatchView& batch) {
  return batch.node(0).signature == batch.node(batch.size() - 1).signature;
}

// regions_of_group returns the operand regions of a group's members. part_of_group returns the part
// of `batch` with the group's members. The part refers to `members`, which must outlive the part.
Regions regions_of_group(const BatchView& batch, size_t slot, const WeightGroup& group);
BackwardBatch part_of_group(BackwardBatch& batch, const WeightGroup& group,
                            std::vector<NodeId>& members);

}  // namespace autobatch

// Functions for ops whose kernels take instances of one size only. Members of different sizes still
// form one batch. The members are grouped by size, and each group runs as one call.
#pragma once

#include "autobatch/rules/rule.h"

#include <vector>

namespace autobatch {

// Positions of members in a batch.
using Members = std::vector<int64_t>;

// Groups the members so that all members of a group have the same geometry in every operand.
std::vector<Members> groups_of(const BatchView& batch);

// Returns operand `slot` of `members`, stacked: [n, *sizes]. Returns a view if the members'
// operands are evenly spaced in memory, and otherwise a copy.
at::Tensor stacked_of(const BatchView& batch, size_t slot, const Members& members);
bool lies_stacked(const BatchView& batch, size_t slot, const Members& members);

// Return result k of `members`, or the gradient of result k, stacked: [n, *sizes].
at::Tensor results_of(const BatchView& batch, uint32_t k, const Members& members);
at::Tensor gradients_of(BackwardBatch& batch, uint32_t k, const Members& members);

// Writes `values` to result k of `members`. `values` is [n, *sizes] in any memory layout. The first
// two dimensions may be merged. The results must have no gaps in memory.
void put_results(const Batch& batch, uint32_t k, const Members& members, const at::Tensor& values);

// Adds row i of `gradient` to the gradient of operand `slot` of members[i], for each i. `gradient`
// is [n, *sizes] in any memory layout, or has another shape with the same elements in the same
// order.
void add_gradients(BackwardBatch& batch, size_t slot, const Members& members,
                   const at::Tensor& gradient);

}  // namespace autobatch

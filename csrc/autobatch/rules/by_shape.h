// For ops whose kernels take instances of one size only: the members of a batch in groups of one
// size, a call each. The batch stays one, whatever the sizes.
#pragma once

#include "autobatch/rules/rule.h"

#include <vector>

namespace autobatch {

// Members of a batch, by their position in it.
using Members = std::vector<int64_t>;

// The members in groups that agree in the geometries of all operands.
std::vector<Members> groups_of(const BatchView& batch);

// The operand of these members, [n, *sizes]: a view where they lie evenly spaced, else a copy.
at::Tensor stacked_of(const BatchView& batch, size_t slot, const Members& members);
bool lies_stacked(const BatchView& batch, size_t slot, const Members& members);

// Result k of these members, [n, *sizes], and its gradient.
at::Tensor results_of(const BatchView& batch, uint32_t k, const Members& members);
at::Tensor gradients_of(BackwardBatch& batch, uint32_t k, const Members& members);

// Writes to result k of each member its part of `values`, [n, *sizes] or with those first two
// dimensions merged, in any layout. Results without gaps.
void put_results(const Batch& batch, uint32_t k, const Members& members, const at::Tensor& values);

// Adds to the operand of each member its part of `gradient`, [n, *sizes] in any layout.
void add_gradients(BackwardBatch& batch, size_t slot, const Members& members,
                   const at::Tensor& gradient);

}  // namespace autobatch

// What the attention rules share: members of one geometry, which one call can serve.
#pragma once

#include "autobatch/rules.h"

#include <vector>

namespace autobatch {

// Members of a batch, by their position in it.
using Members = std::vector<int64_t>;

// The members in groups that agree in the geometries of all operands. A group is divided into
// single members again where one call would need a copy of operands so large that the copy costs
// more than the calls it saves.
std::vector<Members> groups_of(BatchView& batch);

// The operand of these members, [n, *sizes]: a view where they lie evenly spaced, else a copy.
at::Tensor stacked_of(const BatchView& batch, size_t slot, const Members& members);

}  // namespace autobatch

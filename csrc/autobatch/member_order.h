// In which order the members of a batch stand: as those do that read their results, so that these
// find them side by side and need not gather them.
#pragma once

#include "autobatch/backward.h"
#include "autobatch/reads.h"

#include <cstddef>

namespace autobatch {

// The batches from `first_batch` on. Members of one weight (weight_groups.h) stay together.
void order_members(FlushRecord& record, size_t first_batch, const Reads& reads);

}  // namespace autobatch

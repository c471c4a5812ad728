// Running the batches of a flush.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/execute/materialize.h"
#include "autobatch/report.h"

namespace autobatch {

struct FlushOptions;

// Runs the batches from `first_batch` on, one after the other, each in the dispatch context in
// which its ops were captured. If a batch fails, its halves are run separately, down to single
// members. So everything that can be computed is computed (in smaller pieces if memory ran out),
// and the error comes from the member at fault. Afterwards the record contains only the batches and
// nodes that ran. Three options are used: `report`, and `costs` and `estimate`, which receive the
// times of batches.
Failures run_batches(FlushRecord& record, const FlushOptions& options, size_t first_batch);

}  // namespace autobatch

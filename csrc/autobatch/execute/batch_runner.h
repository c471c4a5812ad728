// Running the batches of a flush.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/execute/materialize.h"
#include "autobatch/report.h"

namespace autobatch {

struct FlushOptions;

// Runs those from `first_batch` on, one after the other, each in the context its ops were captured
// in. A batch that fails is run in halves, down to single members: what can be computed is (in
// smaller pieces, if memory ran out), and the error comes from the member at fault. Leaves only
// what ran in the record. Of the options: `report`, and `costs` and `estimate`, which are told how
// long batches took.
Failures run_batches(FlushRecord& record, const FlushOptions& options, size_t first_batch);

}  // namespace autobatch

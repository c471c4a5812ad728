// Runs the batches of a flush.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/execute/materialize.h"
#include "autobatch/report.h"

namespace autobatch {

struct FlushOptions;

// Runs the batches from `first_batch` on, one after the other. Each batch runs in the dispatch
// context in which its ops were captured. If a batch fails, its two halves run separately. Failing
// halves are halved again, down to single members. Therefore all results that do not depend on a
// failed member are computed. If memory ran out, smaller batches may still succeed. The reported
// error is the error of the member that failed. Afterwards the record contains only the batches and
// nodes that ran. The function uses the options `report`, `costs` and `estimate`. The function adds
// times of batches to `costs` and `estimate`.
Failures run_batches(FlushRecord& record, const FlushOptions& options, size_t first_batch);

}  // namespace autobatch

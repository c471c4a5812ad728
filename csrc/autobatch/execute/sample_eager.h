// The parts of an EagerEstimate.
#pragma once

#include "autobatch/graph/eager_estimate.h"
#include "autobatch/rules/batch.h"

namespace autobatch {

// Adds what eager would take for the members of a batch that is about to run: one of them is run
// alone, unless one of its kind has been.
void add_batch(EagerEstimate& estimate, BatchView& batch);

}  // namespace autobatch

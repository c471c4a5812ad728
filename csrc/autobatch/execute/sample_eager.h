// Adds measurements to an EagerEstimate.
#pragma once

#include "autobatch/graph/eager_estimate.h"
#include "autobatch/rules/batch.h"

namespace autobatch {

// Adds the estimated time that eager mode would need for the members of a batch that is about to
// run. One member is run alone and timed, unless a member with the same signature has been timed
// before.
void add_batch(EagerEstimate& estimate, BatchView& batch);

}  // namespace autobatch

// Where results lie, and for how long: decided for the whole flush before it runs.
#pragma once

#include "autobatch/backward.h"

namespace autobatch {

// Fills in the record's store from its batches. `num_signatures`: they are numbered (Signature::
// local). `keep_all`: no slab is dropped before the end of the flush.
void place_values(FlushRecord& record, size_t num_signatures, bool keep_all);

}  // namespace autobatch

// Chains and trees of additions as one node each: `total = total + loss` over all instances is one
// call, and not one after the other.
#pragma once

#include "autobatch/signature.h"

#include <vector>

namespace autobatch {

// Before the schedule: replaces additions of tensors of one shape and type, whose intermediate
// results nobody holds or reads otherwise, by sums of all their terms. `live`, by node, is brought
// up to date.
// `waiting`: nodes that are not run now, and may read what is.
void collapse_sums(Tape& tape, SignatureTable& signatures, std::vector<uint8_t>& live,
                   at::ArrayRef<NodeId> waiting);

}  // namespace autobatch

// Products of a weight with matrices that `cat` puts one upon the other: W [A; B] = W1 A + W2 B, so
// that [A; B] need not be made, nor its gradient.
#pragma once

#include "autobatch/graph/signature.h"

#include <vector>

namespace autobatch {

class FlushGraph;

// Before the schedule: where nobody else reads what `cat` made, and there is a kernel, such a
// product reads the pieces where they lie. The graph is brought up to date.
void collapse_cats(Tape& tape, FlushGraph& graph, SignatureTable& signatures);

// Operand 0 is the weight, the others are the pieces.
const Rule& cat_product_rule();

}  // namespace autobatch

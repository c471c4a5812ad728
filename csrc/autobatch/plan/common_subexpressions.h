// Common subexpression elimination. User code often computes functions of the parameters again for
// each example: weight normalization, a softmax over weights, the product of two low-rank factors,
// a relative position bias. The pass keeps one of the equal nodes and removes the others. Ops that
// read a removed node then read the kept node. So all examples share one matrix, as in hand-batched
// code, and a rule can multiply all examples by this matrix in one product.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/plan/flush_graph.h"

namespace autobatch {

// Runs before scheduling. Two nodes are equal if they have the same signature and equal operands.
// Equal operands are the same regions of graph inputs or of results of equal nodes. The results of
// a removed node become views of the results of the remaining node. A node is not removed if the
// user holds one of its results, if a later flush reads one of its results, or if the op is random.
// Products and convolutions with a result of a remaining node (Rule::gains_if_shared) get a
// separate signature, so that all members of a batch read one matrix (BatchView::shared). Does not
// update `graph`. Returns the number of removed nodes.
size_t eliminate_common_subexpressions(Tape& tape, FlushGraph& graph, SignatureTable& signatures);

}  // namespace autobatch

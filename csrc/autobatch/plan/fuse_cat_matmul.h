// Fuses matmul(weight, cat(pieces)), where `cat` joins the pieces along the rows: W [A; B] = W1 A +
// W2 B. The matrix [A; B] and its gradient are then not stored in memory.
#pragma once

#include "autobatch/graph/signature.h"

namespace autobatch {

class FlushGraph;

// Runs before scheduling. A product is fused with a `cat` if no other node reads the result of the
// `cat` and a small-GEMM kernel exists for the shapes. The product then reads the pieces directly,
// and the `cat` node is removed. Updates `graph`. Returns the number of fused products.
size_t fuse_cat_matmul(Tape& tape, FlushGraph& graph, SignatureTable& signatures);

// The rule of the fused product. Operand 0 is the weight, and the other operands are the pieces.
const Rule& cat_product_rule();

}  // namespace autobatch

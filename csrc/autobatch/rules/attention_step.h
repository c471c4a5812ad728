// Attention of one query, as a step of generation asks for it.
#pragma once

#include "autobatch/rules/by_shape.h"

namespace autobatch {

// Of a batch of scaled_dot_product_attention whose result 0 is as the operands, [N, heads, T,
// width], and result 1 the logarithms of the rows' sums, [N, T, heads]: whether member m has one
// query and no mask, on a CPU with kernels of ours.
bool is_attention_step(const BatchView& batch, int64_t m);

// Computes these members: keys and values of each are read where they lie, whatever their number.
void run_attention_steps(Batch& batch, const Members& members, double scale);

}  // namespace autobatch

// Attention with a single query per head, as in one step of token-by-token generation.
#pragma once

#include "autobatch/rules/by_shape.h"

namespace autobatch {

// Whether member m has a single query per head and no mask, and this library has CPU kernels for
// the query's dtype. `batch` is a batch of scaled_dot_product_attention. Result 0 of this op has
// the shape of the query, [N, heads, T, width]. The hidden result 1 is the logsumexp of each row of
// scores, [N, T, heads].
bool is_attention_step(const BatchView& batch, int64_t m);

// Computes the attention of `members` and writes results 0 and 1. Reads keys and values in place.
// The members may have different numbers of keys.
void run_attention_steps(Batch& batch, const Members& members, double scale);

}  // namespace autobatch

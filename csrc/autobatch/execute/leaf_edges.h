// Handles tensors that become autograd leaves when they become real.
#pragma once

#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/flush_record.h"

#include <torch/csrc/autograd/edge.h>

#include <vector>

namespace autobatch {

// Whether the tensor has an autograd history, or ops of the flush differentiate its value. Returns
// false for a tensor that was made a leaf (`requires_grad=True` on a captured factory) and that no
// op uses.
bool is_recorded(const FlushRecord& record, const PendingTensor& tensor);
// Whether the tensor becomes a leaf, although ops of the flush differentiate its value
// (capture/new_leaves.h).
bool is_new_leaf(const FlushRecord& record, const PendingTensor& tensor);
// Returns one edge for each recorded tensor in `computed`. For a new leaf, this is the edge to the
// leaf's AccumulateGrad. For other tensors, the edge is invalid.
std::vector<torch::autograd::Edge> leaf_edges(const FlushRecord& record,
                                              const std::vector<PendingTensor*>& computed);

}  // namespace autobatch

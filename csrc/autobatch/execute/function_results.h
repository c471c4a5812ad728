// Handles results of custom autograd.Functions (rules/captured_function.h) in a flush.
#pragma once

#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/batch.h"

#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace autobatch {

// Makes a tensor for each result of a custom autograd.Function that user code has dropped and that
// an op of `tape` reads. Because of this tensor, the result gets a separate autograd node. The
// user's backward then runs once, with the whole gradient, and only if autograd needs it. Results
// whose memory in `computed` is released get no tensor.
std::vector<c10::intrusive_ptr<PendingTensor>> hold_function_results(Graph& graph, Tape& tape,
                                                                     const Store& computed);

}  // namespace autobatch

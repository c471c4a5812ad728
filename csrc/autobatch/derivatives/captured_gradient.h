// Captures autograd.grad in an open scope. The ops that compute the gradients become nodes of the
// graph. They are found by the formulas (derivative_formula.h) of the nodes between the outputs and
// the inputs. So the call needs no flush, and the gradients of all instances run in the same
// batches. With create_graph=True, the ordinary backward later runs through these nodes.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace autobatch {

struct DeriveOptions {
  bool retain_graph = false;
  bool create_graph = false;
  bool allow_unused = false;
};

// Returns the gradients of the inputs. A gradient is undefined if eager returns None for the input.
// Returns nullopt, and has no visible effect, if autograd itself must run. One reason is an op
// without a formula. Other reasons are hooks, history outside the graph, and errors, because the
// graph then does not determine the behaviour of autograd.
AUTOBATCH_INTERNAL std::optional<std::vector<at::Tensor>> derive(at::ArrayRef<at::Tensor> outputs,
                                                                 at::ArrayRef<at::Tensor> gradients,
                                                                 at::ArrayRef<at::Tensor> inputs,
                                                                 const DeriveOptions& options);

// Whether gradients of the outputs (pending tensors) reach any graph input that is not one of
// `leaves`.
AUTOBATCH_INTERNAL bool depends_on_others(at::ArrayRef<at::Tensor> outputs,
                                          at::ArrayRef<at::Tensor> leaves);

}  // namespace autobatch

// Captures autograd.grad in an open scope. Its computation is added to the graph as further nodes,
// by the formulas (derivative_formula.h) of the nodes between the outputs and the inputs. So
// nothing is flushed, the gradients of all instances run in the same batches, and with create_graph
// the ordinary backward differentiates these nodes again.
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

// Returns the gradients of the inputs; a gradient is undefined where eager returns None. Returns
// nothing, and has no visible effect, if autograd itself must run: if an op has no formula, or the
// graph does not determine what autograd does (a hook, history outside the graph, an error).
AUTOBATCH_INTERNAL std::optional<std::vector<at::Tensor>> derive(at::ArrayRef<at::Tensor> outputs,
                                                                 at::ArrayRef<at::Tensor> gradients,
                                                                 at::ArrayRef<at::Tensor> inputs,
                                                                 const DeriveOptions& options);

// Whether gradients of the outputs (pending tensors) reach any graph input that is not one of
// `leaves`.
AUTOBATCH_INTERNAL bool depends_on_others(at::ArrayRef<at::Tensor> outputs,
                                          at::ArrayRef<at::Tensor> leaves);

}  // namespace autobatch

// autograd.grad in an open scope, captured: what it would compute is added to the graph as further
// nodes, by the formulas of the nodes between the outputs and the inputs (derivative_formula.h). So
// nothing is flushed, the gradients of all instances run in the same batches, and with create_graph
// they are differentiated again by the ordinary backward.
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

// The gradients of the inputs, undefined where eager gives None. Nothing where autograd has to do
// it: what it would do can't be told from the graph (a hook, history before the graph, an error),
// or an op has no formula. Nothing has happened then.
AUTOBATCH_INTERNAL std::optional<std::vector<at::Tensor>> derive(at::ArrayRef<at::Tensor> outputs,
                                                                 at::ArrayRef<at::Tensor> gradients,
                                                                 at::ArrayRef<at::Tensor> inputs,
                                                                 const DeriveOptions& options);

// Whether a gradient of the outputs, pending tensors, goes to anything but these leaves.
AUTOBATCH_INTERNAL bool depends_on_others(at::ArrayRef<at::Tensor> outputs,
                                          at::ArrayRef<at::Tensor> leaves);

}  // namespace autobatch

// Captures autograd.grad in an open scope. The ops that compute the gradients become nodes of the
// graph. Each node between the outputs and the inputs has a formula (derivative_formula.h), which
// lists the ops for its gradient. Therefore the call needs no flush, and the gradients of all
// instances are computed in the same batches. With create_graph=True, a later backward() runs
// through these nodes.
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
// Returns nullopt, without any visible effect, if autograd itself must run. Autograd must run if an
// op has no formula. Autograd must also run if there are hooks, if an input has a history outside
// the graph, or if eager may raise an error, because the graph describes none of these.
AUTOBATCH_INTERNAL std::optional<std::vector<at::Tensor>> derive(at::ArrayRef<at::Tensor> outputs,
                                                                 at::ArrayRef<at::Tensor> gradients,
                                                                 at::ArrayRef<at::Tensor> inputs,
                                                                 const DeriveOptions& options);

// Whether gradients of the outputs reach a graph input that is not one of `leaves`. The outputs are
// pending tensors.
AUTOBATCH_INTERNAL bool depends_on_others(at::ArrayRef<at::Tensor> outputs,
                                          at::ArrayRef<at::Tensor> leaves);

}  // namespace autobatch

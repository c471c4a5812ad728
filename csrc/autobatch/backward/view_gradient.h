// Computes the gradient of a value from the gradient of one of its views, by ops that are captured.
// A view is not a node (view_ops.h), so autograd's formula of the view op cannot be traced.
#pragma once

#include "autobatch/graph/graph.h"

#include <optional>

namespace autobatch {

// `gradient` is the gradient of `view`, a region of the memory of `whole`. Returns the gradient of
// `whole`, which is zero for elements that are not in the view. Returns nullopt if many ops would
// be needed. Examples are regions that overlap themselves (`unfold`), and regions whose strides do
// not divide each other (a diagonal). `view` and `whole` may be values of the graph that captures
// the ops.
std::optional<at::Tensor> gradient_behind_view(const Value& view, const Value& whole,
                                               const at::Tensor& gradient);

}  // namespace autobatch

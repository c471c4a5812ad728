// Computes the gradient of a value from the gradient of a view of it, as captured ops. A view is
// address arithmetic and not a node (view_ops.h), so autograd's formulas cannot be traced for it.
#pragma once

#include "autobatch/graph/graph.h"

#include <optional>

namespace autobatch {

// `gradient` is the gradient of `view`, a region of the memory of `whole`. Returns the gradient of
// `whole`, which is zero for elements that the view does not reach. Returns nullopt if more than a
// few ops would be needed. This is the case for regions that overlap themselves (`unfold`), or
// whose strides do not divide each other (a diagonal).
std::optional<at::Tensor> gradient_behind_view(const Value& view, const Value& whole,
                                               const at::Tensor& gradient);

}  // namespace autobatch

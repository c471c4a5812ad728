// The gradient of a value from that of a view of it, by captured ops. A view is address arithmetic
// and no node (view_ops.h), so there is no formula of autograd's to go by.
#pragma once

#include "autobatch/graph/graph.h"

#include <optional>

namespace autobatch {

// `gradient` is that of `view`, a region of the memory of `whole`. Elements of `whole` that the
// view does not reach have a gradient of zero. Nothing where that is not a few ops: regions that
// share memory with themselves (`unfold`), or whose strides do not divide each other (a diagonal).
std::optional<at::Tensor> gradient_behind_view(const Value& view, const Value& whole,
                                               const at::Tensor& gradient);

}  // namespace autobatch

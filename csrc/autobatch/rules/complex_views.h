// view_as_complex and view_as_real, which make a copy in a block.
#pragma once

#include "autobatch/graph/op_registry.h"

namespace autobatch {

// Whether the op is view_as_complex or view_as_real.
bool is_complex_view(const OpInfo& op);
// Whether such an op was captured in this process.
bool are_complex_views_used();

}  // namespace autobatch

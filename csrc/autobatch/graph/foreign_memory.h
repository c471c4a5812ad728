// Memory that others may write to without an op: it is NumPy's, dlpack's or a user's, or was given
// to one of them. No event tells of such a write.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class Graph;
struct GraphInput;

// Whether somebody else may write to the memory. False where nothing that holds an array over it is
// left, as far as can be told.
bool is_given_away(const at::Tensor& tensor);
// Whether only ops write to the memory while we hold its storage.
bool owns_memory(const at::Tensor& tensor);

// Before the tensor's memory is given away: what pending ops are to read there is copied.
AUTOBATCH_INTERNAL void keep_what_is_read(Graph& graph, const at::Tensor& tensor);
// After that. NumPy marks the storage; `unmarked`: others do not.
AUTOBATCH_INTERNAL void note_given_away(const at::Tensor& tensor, bool unmarked);

// Whether the tensor still holds what was copied, bit by bit on a CPU: NaN is NaN, -0 is not 0.
bool is_as_copied(const at::Tensor& tensor, const at::Tensor& copy);

}  // namespace autobatch

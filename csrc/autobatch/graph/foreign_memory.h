// Memory that code outside PyTorch may write to without an op. Such memory belongs to NumPy, to
// dlpack or to the user, or it is memory of PyTorch that was given to such code ("given away").
// PyTorch does not notice a write by such code.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class Graph;
struct GraphInput;

// Whether foreign code may write to the memory. Returns false if no array that shares the memory
// seems to be left.
bool is_given_away(const at::Tensor& tensor);
// Whether only ops write to the memory while this library holds its storage.
bool owns_memory(const at::Tensor& tensor);

// Must be called before the tensor's memory is given away: copies the data that pending ops will
// read.
AUTOBATCH_INTERNAL void keep_what_is_read(Graph& graph, const at::Tensor& tensor);
// Must be called after the tensor's memory was given away. `unmarked` means that the storage
// carries no mark (NumPy marks the storage, other ways do not).
AUTOBATCH_INTERNAL void note_given_away(const at::Tensor& tensor, bool unmarked);

// Whether the tensor still holds the content of `copy`. Compares bits on a CPU: NaN equals NaN, -0
// differs from 0.
bool is_as_copied(const at::Tensor& tensor, const at::Tensor& copy);

}  // namespace autobatch

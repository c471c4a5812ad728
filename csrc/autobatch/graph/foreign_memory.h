// Foreign memory is memory that code outside PyTorch may write to without an op. PyTorch does not
// notice such writes. Foreign memory belongs to NumPy, DLPack or the user, or is memory of PyTorch
// that was passed to code outside PyTorch ("given away").
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class Graph;
struct GraphInput;

// Whether foreign code may write to the memory. Returns false if it is unlikely that a foreign
// array still shares the memory.
bool is_given_away(const at::Tensor& tensor);
// Whether only ops can write to the memory while this library holds its storage.
bool owns_memory(const at::Tensor& tensor);

// If pending ops will read the tensor's memory, copies the memory for these ops. Must be called
// before the memory is given away.
AUTOBATCH_INTERNAL void keep_what_is_read(Graph& graph, const at::Tensor& tensor);
// Must be called after the tensor's memory was given away. `unmarked` means that the export did not
// mark the storage as not resizable. (The export to NumPy marks the storage, other exports do not.)
AUTOBATCH_INTERNAL void note_given_away(const at::Tensor& tensor, bool unmarked);

// Whether the tensor still has the content of `copy`. On a CPU the bits are compared, so NaN equals
// NaN and -0 differs from 0.
bool is_as_copied(const at::Tensor& tensor, const at::Tensor& copy);

}  // namespace autobatch

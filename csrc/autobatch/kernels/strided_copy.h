// Makes row-major copies of CPU tensors whose last dimension is not dense, such as transposed
// tensors.
#pragma once

#include "autobatch/graph/graph.h"

#include <cstdint>

namespace autobatch {

// Copies a tensor with geometry `g`, which begins at `from`, to row-major memory. `item`: bytes of
// an element; a power of two, at most 16.
void copy_strided(const char* from, const Geometry& g, char* out, int64_t item);

}  // namespace autobatch

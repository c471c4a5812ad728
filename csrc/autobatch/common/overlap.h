// Finds whether several elements of a strided tensor share memory.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// Returns true if two elements share memory. Strides count elements, and must not be negative. The
// result is exact for stride 0, for dimensions that do not interleave, and for tensors that span at
// most 16,384 elements of memory. In other cases the result may be true although no elements share
// memory.
bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace autobatch

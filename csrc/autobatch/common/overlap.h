// Finds whether several elements of a strided tensor share memory.
#pragma once

#include <c10/util/ArrayRef.h>

namespace autobatch {

// Returns true if two elements share memory. Strides count elements, and must not be negative. The
// result is exact in three cases: if a stride is 0, if the dimensions do not interleave, and if the
// tensor spans at most 16,384 elements of memory. In other cases the result may be true although no
// elements share memory.
bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace autobatch

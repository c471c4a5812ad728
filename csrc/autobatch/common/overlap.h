// Whether elements of a strided tensor share memory.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// Strides are in elements, and not negative. The result is exact for stride 0, for dimensions that
// do not interleave, and for up to 16,384 elements of memory (stripes of a chart, for example). In
// other cases the result may be true although no elements share memory.
bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace autobatch

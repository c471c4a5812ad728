// Whether elements of a strided tensor share memory.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// Strides are in elements, none negative. Exact for stride 0, for dimensions that are clear of each
// other, and for up to 16,384 elements of memory (the stripes of a chart); else true if in doubt.
bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace autobatch

// The weight, bias and statistics of normalizations. Each is a vector with one number for each
// channel.
#pragma once

#include "autobatch/rules/node_builder.h"

#include <cstdint>
#include <vector>

namespace autobatch {

// Adds an optional argument to `builder`, as an operand. If the argument is given, it must be a
// vector [channels] and a weight (docs/glossary.md). Returns false if the vector is computed in the
// block, or if its size or dtype does not fit `x`.
inline bool capture_channel_vector(NodeBuilder& builder, size_t argument, int64_t channels,
                                   const Value& x) {
  if (!builder.is_tensor(argument)) {
    builder.absent(argument);
    return true;
  }
  if (builder.is_computed(argument)) return false;
  const Value w = builder.weight(argument);
  return w.dtype == x.dtype && w.geometry->sizes == std::vector<int64_t>{channels};
}

}  // namespace autobatch

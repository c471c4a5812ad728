// Groups lists of regions by dtype and device, because one call of a kernel takes regions of one
// dtype on one device.
#pragma once

#include "autobatch/kernels/gather.h"

namespace autobatch {

// Calls `call(from, to)`, such as copy_regions, once for each dtype and device. from[i] and to[i]
// have the same dtype and device.
template <class Call>
void for_each_kind(const Regions& from, const Regions& to, const Call& call) {
  std::vector<bool> done(from.size());
  for (size_t first = 0; first < from.size(); ++first) {
    if (done[first]) continue;
    const at::Tensor& like = *from[first].buffer;
    Regions some_from, some_to;
    for (size_t i = first; i < from.size(); ++i) {
      const at::Tensor& buffer = *from[i].buffer;
      if (buffer.scalar_type() != like.scalar_type() || buffer.device() != like.device()) continue;
      some_from.push_back(from[i]);
      some_to.push_back(to[i]);
      done[i] = true;
    }
    call(some_from, some_to);
  }
}

}  // namespace autobatch

// What a kernel has to know of the host's numbers: lengths, positions, factors.
#pragma once

#include <ATen/core/Tensor.h>

namespace autobatch {

// A tensor of the host on this device. Nobody waits for the copy: it goes from pinned memory, which
// its allocator keeps until the copy is done.
at::Tensor sent(const at::Tensor& numbers, c10::Device device);

}  // namespace autobatch

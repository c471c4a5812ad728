// Sends numbers of the host to the device of a kernel: lengths, positions, factors.
#pragma once

#include <ATen/core/Tensor.h>

namespace autobatch {

// Returns a tensor of the host on `device`. Does not wait for the copy: its source is pinned
// memory, which the allocator keeps until the copy is done.
at::Tensor to_device(const at::Tensor& numbers, c10::Device device);

}  // namespace autobatch

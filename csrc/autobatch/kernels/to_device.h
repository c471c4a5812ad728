// Copies numbers, such as lengths, positions or factors, from the host to the device of a kernel.
#pragma once

#include <ATen/core/Tensor.h>

namespace autobatch {

// Returns a copy of a host tensor on `device`. Does not wait for the copy. The source is pinned
// memory, which the allocator does not reuse before the copy is done.
at::Tensor to_device(const at::Tensor& numbers, c10::Device device);

}  // namespace autobatch

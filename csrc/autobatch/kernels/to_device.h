// Copies numbers, such as lengths, positions or factors, from the host to the device of a kernel.
#pragma once

#include <ATen/core/Tensor.h>

namespace autobatch {

// Returns a copy of a host tensor on `device`. Does not wait until the copy is done: the source is
// pinned memory, which the allocator keeps until then.
at::Tensor to_device(const at::Tensor& numbers, c10::Device device);

}  // namespace autobatch

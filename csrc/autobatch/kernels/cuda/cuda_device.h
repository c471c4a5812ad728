// Checks whether the current device can run the CUDA kernels.
#pragma once

namespace autobatch::cuda {

// Whether this library has kernels for the current device. The answer is cached for each device.
bool has_kernels_here();

}  // namespace autobatch::cuda

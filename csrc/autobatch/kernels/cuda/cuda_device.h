// A query of the current device that the callers of the CUDA kernels share.
#pragma once

namespace autobatch::cuda {

// Whether this library has kernels for the current device. The answer is cached for each device.
bool has_kernels_here();

}  // namespace autobatch::cuda

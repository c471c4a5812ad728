// What both of the CUDA kernels' callers ask of the current device.
#pragma once

namespace autobatch::cuda {

// Whether this library has kernels for it. Asked once for each device.
bool has_kernels_here();

}  // namespace autobatch::cuda

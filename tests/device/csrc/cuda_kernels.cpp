// CUDA kernels of this library, compiled for the CPU.
#include "autobatch/kernels/cuda/gather.h"
#include "cuda_on_cpu.h"

namespace autobatch::on_device {
using namespace cuda;
}
#define __CUDA_ARCH__ 900
#define cuda on_device
#include "autobatch/kernels/cuda/gather.cu"
#undef cuda

namespace simulated {

int find_rows_on_cpu(const autobatch::cuda::SentRows& rows, int64_t* out);

int find_rows_on_cpu(const autobatch::cuda::SentRows& rows, int64_t* out) {
  return autobatch::on_device::find_rows(rows, out, nullptr);
}

}  // namespace simulated

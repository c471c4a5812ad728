#include "autobatch/kernels/to_device.h"

#include "autobatch/common/device_traits.h"

#include <ATen/ops/empty_like.h>

namespace autobatch {

at::Tensor to_device(const at::Tensor& numbers, c10::Device device) {
  if (has_host_memory(device)) return numbers;
  const at::Tensor pinned = at::empty_like(numbers, numbers.options().pinned_memory(true));
  pinned.copy_(numbers);
  return pinned.to(numbers.options().device(device), /*non_blocking=*/true);
}

}  // namespace autobatch

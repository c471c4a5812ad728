#include "autobatch/common/device_traits.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

namespace autobatch {

c10::DeviceType accelerator() { return at::getAccelerator().value_or(at::kCUDA); }

c10::DispatchKey autocast_key_of_accelerator() {
  return at::autocast::get_autocast_dispatch_key_from_device_type(accelerator());
}

}  // namespace autobatch

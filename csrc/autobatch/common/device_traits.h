// What the library asks about devices: the one place to say how an accelerator differs.
//
// An accelerator that PyTorch knows works without an entry here, by ATen's kernels. Kernels of its
// own for regions are registered in kernels/gather_device.h.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

namespace autobatch {

struct DeviceTraits {
  // Our own loops read and write its memory, and reading a value costs nothing. Elsewhere work is a
  // call of a kernel, and whoever reads a value waits for what was launched before.
  bool has_host_memory = false;
  // A call costs more than small batches compute: what saves memory or work by more calls doesn't
  // pay.
  bool wants_few_launches = true;
  // Its tensors are a storage, sizes and strides and nothing else, so that a view can be made
  // without its as_strided.
  bool has_plain_views = false;
  // Eager multiplies the gradient of extremes and medians by a mask, where others fill in zeros: an
  // infinite one gives NaN (evenly_distribute_backward, torch/csrc/autograd/FunctionsManual.cpp).
  bool multiplies_by_masks = false;
};

constexpr DeviceTraits traits_of(c10::DeviceType type) {
  switch (type) {
    case c10::DeviceType::CPU:
      return {.has_host_memory = true, .wants_few_launches = false, .has_plain_views = true};
    case c10::DeviceType::CUDA:
      return {.has_plain_views = true, .multiplies_by_masks = true};
    case c10::DeviceType::HIP:
    case c10::DeviceType::XPU:
      return {.has_plain_views = true};
    default:
      return {};
  }
}

inline bool has_host_memory(c10::Device device) { return traits_of(device.type()).has_host_memory; }
inline bool wants_few_launches(c10::Device device) {
  return traits_of(device.type()).wants_few_launches;
}
inline bool has_plain_views(c10::Device device) { return traits_of(device.type()).has_plain_views; }
inline bool multiplies_by_masks(c10::Device device) {
  return traits_of(device.type()).multiplies_by_masks;
}

// A process has one kind of accelerator; CUDA where it has none. DispatchContext's `autocast_cuda`
// is autocast on that.
c10::DeviceType accelerator();
c10::DispatchKey autocast_key_of_accelerator();

}  // namespace autobatch

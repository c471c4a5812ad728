// The properties of devices that the library depends on. Differences between accelerators are
// described only in this file.
//
// An accelerator that PyTorch supports needs no entry in this file, and its ops run in ATen's
// kernels. Kernels that copy between memory regions can be registered for the accelerator
// (kernels/gather_device.h).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

namespace autobatch {

struct DeviceTraits {
  // Loops of this library can access the memory directly, and reading a value is free. On other
  // devices kernels do all work, and reading a value waits for all earlier launches.
  bool has_host_memory = false;
  // A launch costs more than the computation of a small batch, so an additional launch costs more
  // time than it can save.
  bool wants_few_launches = true;
  // A tensor is fully described by its storage, sizes and strides, so a view can be made without
  // the device's as_strided.
  bool has_plain_views = false;
  // In the backward of maximum, minimum and median, eager multiplies the gradient by a mask, so an
  // infinite gradient becomes NaN. If multiplies_by_masks is false, eager writes zeros instead
  // (evenly_distribute_backward, torch/csrc/autograd/FunctionsManual.cpp).
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

// Returns the device type of the accelerator, or CUDA if there is no accelerator. A process has at
// most one type of accelerator. DispatchContext's `autocast_cuda` is the autocast state of this
// accelerator.
c10::DeviceType accelerator();
c10::DispatchKey autocast_key_of_accelerator();

}  // namespace autobatch

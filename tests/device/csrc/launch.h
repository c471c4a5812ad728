// A launch: gives CPU tensors over the memory of device tensors, and converts results back.
#pragma once

#include "device.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace simulated {

class Launch {
 public:
  // A launch on the device's current stream. The code that runs during its lifetime is the kernel.
  Launch(std::string op, c10::Device device);
  // Tag for a launch that is not counted, e.g. for ops that only read metadata.
  struct Uncounted {};
  Launch(std::string op, c10::Device device, Uncounted);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Returns a CPU tensor over a device tensor's memory. Returns other tensors unchanged.
  at::Tensor argument(const at::Tensor& tensor, bool writes = false);
  std::optional<at::Tensor> argument(const std::optional<at::Tensor>& tensor);
  // Returns the host address of device memory, for a kernel that takes addresses.
  char* memory(const void* address, size_t bytes, bool writes);
  // Returns a result on the device: a view of an argument, or a tensor with new memory. An
  // undefined tensor stays undefined.
  at::Tensor result(const at::Tensor& on_host);
  // Copies a written argument's sizes, strides and, if it grew, its contents back to the device
  // tensor.
  void take_over(const at::Tensor& tensor, const at::Tensor& on_host);

  c10::Device device() const { return device_; }
  int stream() const { return stream_; }

 private:
  void note(const at::Tensor& tensor, bool writes);

  std::string op_;
  c10::Device device_;
  int stream_;
  uint64_t tick_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> on_host_;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> of_alias_;
};

}  // namespace simulated

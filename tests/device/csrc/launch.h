// A launch: tensors of the device as tensors of the CPU over what lies there, and back.
#pragma once

#include "device.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace simulated {

class Launch {
 public:
  // On the current stream of this device. What runs while it lives is the kernel.
  Launch(std::string op, c10::Device device);
  // Not counted as one: for what only looks at metadata.
  struct Uncounted {};
  Launch(std::string op, c10::Device device, Uncounted);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Of a tensor of the device; others are as they are.
  at::Tensor argument(const at::Tensor& tensor, bool writes = false);
  std::optional<at::Tensor> argument(const std::optional<at::Tensor>& tensor);
  // Memory of the device, for a kernel that is given addresses.
  char* memory(const void* address, size_t bytes, bool writes);
  // A result on the device: a view of an argument, or new memory. Undefined stays undefined.
  at::Tensor result(const at::Tensor& on_host);
  // What became of an argument that was written to: it may have been resized.
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

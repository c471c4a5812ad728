#include "launch.h"

#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

namespace simulated {
namespace {

// Returns the number of bytes from the data pointer to the end of the last element.
size_t extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

const char* address_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.storage().data()) +
         static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
}

}  // namespace

Launch::Launch(std::string op, c10::Device device, Uncounted)
    : op_(std::move(op)),
      device_(device),
      stream_(number_of(current_stream(device.index()))),
      tick_(tick(stream_)) {
  set_current_op(op_);
}

Launch::Launch(std::string op, c10::Device device) : Launch(std::move(op), device, Uncounted{}) {
  count(kLaunches, op_);
}

Launch::~Launch() = default;

void Launch::note(const at::Tensor& tensor, bool writes) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr) return;
  const char* first = address_of(tensor);
  check_access(block->accesses, {stream_, tick_, first, first + extent_of(tensor), writes, op_});
}

char* Launch::memory(const void* address, size_t bytes, bool writes) {
  Block* block = block_at(address);
  const char* first = static_cast<const char*>(address);
  TORCH_CHECK(block != nullptr && first + bytes <= block->address + block->bytes, "sim: ", op_,
              " was given memory that isn't the device's");
  check_access(block->accesses, {stream_, tick_, first, first + bytes, writes, op_});
  return simulated::on_host(address);
}

at::Tensor Launch::argument(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.device().type() != kType) return tensor;
  TORCH_CHECK(tensor.device() == device_, "Expected all tensors to be on the same device, but ",
              op_, " got one on ", tensor.device(), " and one on ", device_);
  note(tensor, writes);
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  auto [known, is_new] = on_host_.try_emplace(storage);
  if (is_new) {
    const void* address = tensor.storage().data();
    void* there = address == nullptr ? nullptr : on_host(address);
    known->second = c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                                 c10::DataPtr(there, c10::Device(c10::DeviceType::CPU)),
                                 c10::GetCPUAllocator(), true);
    of_alias_.emplace(known->second.unsafeGetStorageImpl(), tensor);
  }
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(known->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  c10::TensorImpl* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

std::optional<at::Tensor> Launch::argument(const std::optional<at::Tensor>& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  return argument(*tensor);
}

at::Tensor Launch::result(const at::Tensor& on_host) {
  if (!on_host.defined()) return on_host;
  TORCH_CHECK(on_host.layout() == c10::kStrided, "sim: ", op_, " gives a tensor that isn't dense");
  const auto argument = of_alias_.find(on_host.storage().unsafeGetStorageImpl());
  if (argument != of_alias_.end()) {
    const at::Tensor& of = argument->second;  // the dtype may differ, as in view_as_real
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(of.storage()), of.key_set(), on_host.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(on_host.sizes(), on_host.strides(),
                                                      on_host.storage_offset());
    view._set_conj(on_host.is_conj());
    view._set_neg(on_host.is_neg());
    return view;
  }
  const at::Tensor made =
      at::empty_strided(on_host.sizes(), on_host.strides(), on_host.options().device(device_));
  if (const size_t bytes = extent_of(on_host)) {
    note(made, true);
    std::memcpy(simulated::on_host(made.storage().data()), address_of(on_host), bytes);
  }
  if (on_host.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

void Launch::take_over(const at::Tensor& tensor, const at::Tensor& on_host) {
  if (tensor.sizes() == on_host.sizes() && tensor.strides() == on_host.strides()) return;
  const void* old = tensor.storage().data();
  const void* now = on_host.storage().data();
  if (old == nullptr || simulated::on_host(old) != now) {  // the kernel allocated more memory
    const size_t bytes = on_host.storage().nbytes();
    resize(tensor.storage(), bytes);
    if (bytes > 0) std::memcpy(simulated::on_host(tensor.storage().data()), now, bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(on_host.sizes(), on_host.strides(),
                                                      on_host.storage_offset());
}

}  // namespace simulated

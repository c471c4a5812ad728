// The device's kernels. Special kernels allocate and copy memory. CPU kernels run all other ops.
#include "launch.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace simulated {

at::Generator numbers_of(const at::Generator& generator);  // runtime.cpp
at::Generator numbers_of(c10::DeviceIndex device);         // default generator

namespace {

using at::Tensor;
using Options = std::optional<c10::ScalarType>;

// ---- memory

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "sim: dense tensors only");
  TORCH_CHECK(!pin.value_or(false), "sim: memory of the device can't be pinned");
}

Tensor empty(c10::IntArrayRef sizes, Options dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin,
             std::optional<c10::MemoryFormat> format) {
  check_options(layout, pin);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, Options dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                     std::optional<bool> pin) {
  check_options(layout, pin);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Returns a zero tensor without memory, which autograd uses.
Tensor zero_tensor(c10::IntArrayRef sizes, Options dtype, std::optional<c10::Layout> layout,
                   std::optional<c10::Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::impl::VirtualGuardImpl runtime(kType);
  at::native::ZeroTensorAllocator none(runtime.getDevice());
  return at::detail::empty_generic(sizes, &none, kKeys.add(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes,
                      std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef sizes) { return at::native::view(self, sizes); }

void record_stream_of(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// ---- copies

// The host waits for blocking copies and for copies to unpinned host memory. A non-blocking copy to
// pinned memory does not wait, and takes effect on the host at its next synchronisation.
void copy_to_host(const Tensor& self, const Tensor& to, bool non_blocking) {
  Launch launch("copy to the host", self.device(), Launch::Uncounted{});
  count(kToHost, "copy");
  const Tensor source = launch.argument(self);
  const bool late = non_blocking && to.is_pinned();
  if (!late) {
    count(kSynchronisations, "of a copy to the host");
    host_waits_for_stream(current_stream(self.device().index()));
    to.copy_(source);
    return;
  }
  const Tensor value = source.clone();
  if (to.is_floating_point()) Tensor(to).fill_(std::numeric_limits<double>::quiet_NaN());
  deliver_later(launch.stream(), [value, to] { Tensor(to).copy_(value); });
}

void copy_from_host(const Tensor& self, const Tensor& to, bool non_blocking) {
  Launch launch("copy to the device", to.device(), Launch::Uncounted{});
  count(kToDevice, "copy");
  const bool pinned = self.is_pinned();
  launch.argument(to, true).copy_(self);
  if (!non_blocking) {
    count(kSynchronisations, "of a copy from the host");
    host_waits_for_stream(current_stream(to.device().index()));
  } else if (pinned) {
    const Tensor sent = self.clone();
    deliver_later(launch.stream(), [sent, self] {
      TORCH_CHECK(at::equal(sent.view(-1), self.reshape(-1)),
                  "sim: pinned memory was written to before its copy to the device was done");
    });
  }
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (self.device().type() != kType) {
    copy_from_host(self, to, non_blocking);
  } else if (to.device().type() != kType) {
    copy_to_host(self, to, non_blocking);
  } else if (self.device() == to.device()) {
    Launch launch("aten::copy_", self.device());
    launch.argument(to, true).copy_(launch.argument(self));
  } else {  // the current streams of both devices wait for each other
    Event event;
    record(event, current_stream(self.device().index()));
    wait(event, current_stream(to.device().index()));
    Launch from("copy to another device", self.device(), Launch::Uncounted{});
    const Tensor value = from.argument(self).clone();
    Launch launch("aten::copy_", to.device());
    launch.argument(to, true).copy_(value);
    record(event, current_stream(to.device().index()));
    wait(event, current_stream(self.device().index()));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Launch launch("aten::_local_scalar_dense", self.device(), Launch::Uncounted{});
  count(kToHost, "a number");
  count(kSynchronisations, "of a number that is read");
  const Tensor source = launch.argument(self);
  host_waits_for_stream(current_stream(self.device().index()));
  return source.item();
}

// ---- ops that run with CPU kernels

// As on CUDA, these ops accept indices on the CPU, which are copied to the device.
bool takes_cpu_tensors(const std::string& op) {
  return op == "aten::index" || op == "aten::_index_put_impl_" || op == "aten::index_put_" ||
         op == "aten::_unsafe_index";
}

// During its lifetime, CPU kernels draw random numbers from the device's generator.
class DrawsOfDevice {
 public:
  explicit DrawsOfDevice(c10::Device device)
      : numbers_(numbers_of(device.index())), before_(cpu_.get_state()) {
    cpu_.set_state(numbers_.get_state());
  }
  ~DrawsOfDevice() {
    numbers_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }
  DrawsOfDevice(const DrawsOfDevice&) = delete;
  DrawsOfDevice& operator=(const DrawsOfDevice&) = delete;

 private:
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  at::Generator numbers_;
  Tensor before_;
};

class Fallback {
 public:
  Fallback(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        first_(stack.size() - schema_.arguments().size()),
        launch_(schema_.name(), device()) {}

  void run() {
    std::vector<c10::IValue> given(stack_.begin() + static_cast<ptrdiff_t>(first_), stack_.end());
    for (size_t i = 0; i < given.size(); ++i) stack_[first_ + i] = translated(given[i], i);
    const std::vector<c10::IValue> called(stack_.begin() + static_cast<ptrdiff_t>(first_),
                                          stack_.end());
    if (is_read()) {
      count(kToHost, schema_.name());
      count(kSynchronisations, "of " + schema_.name() + ", whose result the host has to know");
      host_waits_for_stream(current_stream(launch_.device().index()));
    }
    std::optional<DrawsOfDevice> draws;
    const bool names_generator = std::any_of(
        given.begin(), given.end(), [](const c10::IValue& value) { return value.isGenerator(); });
    if (op_.hasTag(at::Tag::nondeterministic_seeded) && !names_generator) {
      draws.emplace(launch_.device());
    }
    op_.callBoxed(&stack_);
    draws.reset();
    for (size_t i = 0; i < given.size(); ++i) {
      if (writes(i)) take_over(given[i], called[i]);
    }
    const size_t results = schema_.returns().size();
    for (size_t i = 0; i < results; ++i) {
      c10::IValue& value = stack_[stack_.size() - results + i];
      value = returned(value, i, given);
    }
  }

 private:
  // Returns the device of the first tensor on this kind of device, else the argument `device`.
  c10::Device device() const {
    std::optional<c10::Device> named;
    for (size_t i = first_; i < stack_.size(); ++i) {
      const c10::IValue& value = stack_[i];
      if (value.isDevice() && value.toDevice().type() == kType) named = value.toDevice();
      std::optional<c10::Device> found;
      for_each_tensor(value, [&](const Tensor& tensor) {
        if (!found && tensor.device().type() == kType) found = tensor.device();
      });
      if (found) return *found;
    }
    const c10::impl::VirtualGuardImpl guard(kType);
    return named && named->has_index() ? *named : guard.getDevice();
  }

  template <class Visit>
  static void for_each_tensor(const c10::IValue& value, const Visit& visit) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined()) visit(*tensor);
      }
    }
  }

  bool writes(size_t argument) const {
    const c10::AliasInfo* alias = schema_.arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  Tensor translated(const Tensor& tensor, bool written) {
    if (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) {
      TORCH_CHECK(takes_cpu_tensors(schema_.name()),
                  "Expected all tensors to be on the same device, but ", schema_.name(),
                  " got one on cpu and one on ", launch_.device());
      count(kToDevice, "indices of " + schema_.name());
      count(kSynchronisations, "of indices that lie on the host");
    }
    return launch_.argument(tensor, written);
  }

  c10::IValue translated(const c10::IValue& value, size_t argument) {
    if (value.isTensor()) return translated(value.toTensor(), writes(argument));
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(translated(tensor, writes(argument)));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(translated(*tensor, false)) : std::nullopt);
      }
      return list;
    }
    if (value.isGenerator()) return numbers_of(value.toGenerator());
    if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(at::kCPU);
    return value;
  }

  // Whether the host must wait, because the op returns a number or a size that depends on values.
  bool is_read() const {
    if (op_.hasTag(at::Tag::data_dependent_output)) return true;
    if (!op_.hasTag(at::Tag::dynamic_output_shape)) return false;
    if (schema_.name() == "aten::repeat_interleave") return stack_[first_ + 1].isNone();
    if (schema_.name() != "aten::index" && schema_.name() != "aten::_unsafe_index") return true;
    bool by_mask = false;
    for_each_tensor(stack_[first_ + 1], [&](const Tensor& index) {
      by_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
    return by_mask;
  }

  void take_over(const c10::IValue& given, const c10::IValue& called) {
    if (given.isTensor()) {
      launch_.take_over(given.toTensor(), called.toTensor());
    } else if (given.isTensorList()) {
      const auto before = given.toTensorVector();
      const auto after = called.toTensorVector();
      for (size_t i = 0; i < before.size(); ++i) launch_.take_over(before[i], after[i]);
    }
  }

  c10::IValue returned(const c10::IValue& value, size_t result,
                       const std::vector<c10::IValue>& given) {
    const c10::AliasInfo* alias = schema_.returns()[result].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t i = 0; i < given.size(); ++i) {
        const c10::AliasInfo* argument = schema_.arguments()[i].alias_info();
        if (argument != nullptr && argument->beforeSets() == alias->beforeSets()) return given[i];
      }
    }
    if (value.isTensor()) return launch_.result(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(launch_.result(tensor));
    return list;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t first_;
  Launch launch_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Fallback(op, *stack).run();
}

// ---- ops that PyTorch has for accelerators only

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  Launch launch("aten::convolution", input.device());
  return launch.result(at::convolution(launch.argument(input), launch.argument(weight),
                                       launch.argument(bias), stride, padding, dilation, transposed,
                                       output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Launch launch("aten::convolution_backward", input.device());
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [x, w, b] =
      at::convolution_backward(launch.argument(grad), launch.argument(input),
                               launch.argument(weight), c10::IntArrayRef{channels}, stride, padding,
                               dilation, transposed, output_padding, groups, mask);
  return {launch.result(x), launch.result(w), launch.result(b)};
}

int64_t no_fused_attention(const Tensor&, const Tensor&, const Tensor&,
                           const std::optional<Tensor>&, double, bool, std::optional<double>,
                           bool) {
  return 0;  // SDPBackend::math
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zero_tensor);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias",
         [](const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
           return at::native::as_strided_tensorimpl(self, sizes, strides, self.storage_offset());
         });
  m.impl("record_stream", record_stream_of);
  m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& {
    return at::native::set_tensor_(self, source);
  });
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    return at::native::set_(self, std::move(source));
  });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
            c10::IntArrayRef strides) -> Tensor& {
           return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
         });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Copies resolve the conjugate and negative bits themselves. The fallbacks of these keys would make
// a copy first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::no_fused_attention)
}  // namespace at::native

// Unboxed kernels for the ops that models call most often. If a call is in the cache, it is
// captured without boxing its arguments on a stack. All other calls use the boxed fallback.
#include "autobatch/capture/arguments.h"
#include "autobatch/capture/capture.h"
#include "autobatch/capture/known_values.h"
#include "autobatch/capture/try_cached_call.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/scope/scope.h"

#include <ATen/Operators.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace autobatch {
namespace {

void give(Recorded& recorded, at::Tensor& out) { out = std::move(recorded.tensors[0]); }

void give(Recorded& recorded, std::vector<at::Tensor>& out) {
  out.assign(std::make_move_iterator(recorded.tensors.begin()),
             std::make_move_iterator(recorded.tensors.end()));
}

template <class... Tensors>
void give(Recorded& recorded, std::tuple<Tensors...>& out) {
  size_t k = 0;
  std::apply([&](auto&... each) { ((each = std::move(recorded.tensors[k++])), ...); }, out);
}

// The kernel of `Op`, a struct of at::_ops.
template <class Op, class Schema = typename Op::schema>
struct Unboxed;

template <class Op, class Return, class... Args>
struct Unboxed<Op, Return(Args...)> {
  static Return call(c10::DispatchKeySet keys, Args... args) {
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    if (keys.has_any(compat::kBeforeCapture)) [[unlikely]] {
      return boxed(op, keys, std::forward<Args>(args)...);
    }
    const CaptureState& state = CaptureState::current();
    static const OpInfo& info = op_info(op);
    static const bool for_tensors = is_captured_for_tensors(info);
    if (for_tensors && may_pass(state)) {
      CaptureReasons reasons(state);
      (reasons.add(args), ...);
      if (!reasons.any()) {
        const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
        return Op::redispatch(keys & kBelowCapture, std::forward<Args>(args)...);
      }
    }
    if (Scope* scope = capturing_scope(state)) {
      const Scope::Lock lock(*scope);
      if (may_use_call_cache_first(*scope)) {
        CallKey key(info, scope->graph(), CallContext(state), scope->tables().calls.next());
        (key.add(args), ...);
        Recorded recorded;
        if (try_cached_call(*scope, info, key, recorded)) {
          Return out;
          give(recorded, out);
          return out;
        }
      }
    }
    return boxed(op, keys, std::forward<Args>(args)...);
  }

 private:
  static Return boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Args... args) {
    torch::jit::Stack stack = c10::impl::boxArgs<Args...>(std::forward<Args>(args)...);
    capture(op, keys, &stack);
    return c10::impl::PopResult<Return>::call(stack);
  }
};

// The dtypes of numbers that can be read directly from the memory of a tensor.
#define AUTOBATCH_NUMBERS(_) AT_FORALL_SCALAR_TYPES_AND3(Bool, Half, BFloat16, _)

bool can_read(const at::Tensor& self) {
  if (!has_host_memory(self.device())) return false;
  switch (self.scalar_type()) {
#define AUTOBATCH_CASE(ctype, name) case at::ScalarType::name:
    AUTOBATCH_NUMBERS(AUTOBATCH_CASE)
#undef AUTOBATCH_CASE
    return true;
    default:
      return false;
  }
}

at::Scalar number_at(const void* element, at::ScalarType type) {
  switch (type) {
#define AUTOBATCH_CASE(ctype, name) \
  case at::ScalarType::name:        \
    return at::Scalar(*static_cast<const ctype*>(element));
    AUTOBATCH_NUMBERS(AUTOBATCH_CASE)
#undef AUTOBATCH_CASE
    default:
      TORCH_INTERNAL_ASSERT(false, "unexpected type of a number: ", type);
  }
}

// Converts the number to the op's return type.
template <class Return>
Return as(const at::Scalar& number) {
  if constexpr (std::is_same_v<Return, bool>) {
    return number.isBoolean() ? number.toBool() : !number.equal(0);
  } else {
    return number;
  }
}

// The result of reading a pending tensor's only element. If the tensor became real, the result
// holds the tensor. If the tensor may stay pending, the result holds the address of its value. If
// the boxed fallback has to handle the read, the result holds neither a tensor nor an address.
struct NumberRead {
  at::Tensor tensor;
  const void* element = nullptr;
};
// `in_place` means that the number can be read at its address.
NumberRead read_number(const OpInfo& info, const std::string& reason, const at::Tensor& self,
                       bool in_place) {
  PendingTensor* pending = as_pending(self);
  Scope* scope = pending != nullptr ? capturing_scope() : nullptr;
  if (scope == nullptr || has_tangent(self)) return {};
  CellTrace::note_read(info.name);
  if (at::Tensor known = known_value(*scope, self); known.defined()) return {std::move(known)};
  scope->note_at_once(info.name, kNeedsValues);
  pending->check_not_lost();
  if (in_place && pending->graph() == &scope->graph()) {
    if (const void* element = scope->element_of(*pending)) return {{}, element};
    scope->compute({pending}, reason, /*values_only=*/true);
    pending->check_not_lost();
    if (const void* element = scope->element_of(*pending)) return {{}, element};
  }
  ensure_real({pending}, reason);
  return {self};
}

// The kernel of an op that reads one value.
template <class Op, class Schema = typename Op::schema>
struct Read;

template <class Op, class Return>
struct Read<Op, Return(const at::Tensor&)> {
  static Return call(c10::DispatchKeySet keys, const at::Tensor& self) {
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    static const OpInfo& info = op_info(op);
    static const std::string reason = info.name + ": needs values";
    NumberRead read;
    if (self.numel() == 1) read = read_number(info, reason, self, can_read(self));
    if (read.element != nullptr) return as<Return>(number_at(read.element, self.scalar_type()));
    if (read.tensor.defined()) {
      const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
      return Op::call(read.tensor);
    }
    torch::jit::Stack stack = c10::impl::boxArgs<const at::Tensor&>(self);
    capture(op, keys, &stack);
    return c10::impl::PopResult<Return>::call(stack);
  }
};

template <class... Ops>
void register_each(torch::Library& library) {
  const auto name = [](const char* op, const char* overload) {
    return *overload == '\0' ? std::string(op) : std::string(op) + "." + overload;
  };
  (library.impl(name(Ops::name, Ops::overload_name).c_str(), TORCH_FN(Unboxed<Ops>::call)), ...);
}

}  // namespace

void register_unboxed(torch::Library& library) {
  namespace op = at::_ops;
#define FUSED_ELEMENTWISE_OP(Name, name, ...) op::name,
#define ELEMENTWISE_OP(name, ...) op::name,
  register_each<
#include "autobatch/kernels/elementwise_ops.inc"
      op::add_Tensor, op::sub_Tensor, op::mul_Tensor, op::div_Tensor, op::neg, op::rsub_Scalar,
      op::maximum, op::minimum, op::pow_Tensor_Scalar, op::clone>(library);
  library.impl("item", TORCH_FN(Read<op::item>::call));
  library.impl("is_nonzero", TORCH_FN(Read<op::is_nonzero>::call));
  register_each<op::linear, op::matmul, op::mm, op::mv, op::dot, op::bmm, op::addmm, op::baddbmm,
                op::lstm_cell, op::gru_cell>(library);
  register_each<op::cat, op::stack, op::embedding, op::index_select, op::sum, op::sum_dim_IntList,
                op::mean, op::mean_dim, op::log_softmax_int, op::softmax_int,
                op::cross_entropy_loss, op::nll_loss, op::layer_norm>(library);
  register_each<op::select_int, op::slice_Tensor, op::narrow, op::chunk, op::split_Tensor,
                op::unbind_int, op::squeeze, op::squeeze_dim, op::unsqueeze, op::transpose_int,
                op::t, op::permute, op::expand, op::view, op::reshape, op::detach>(library);
}

}  // namespace autobatch

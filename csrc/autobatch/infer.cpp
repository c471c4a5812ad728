#include "autobatch/infer.h"

#include "autobatch/compat.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string_view>

namespace autobatch {
namespace {

using torch::jit::Stack;

// Their Meta kernels give other strides or dtypes than the CPU's: they run once on zeros instead.
constexpr std::string_view kWrongOnMeta[] = {
    "aten::fft_",       "aten::svd",        "aten::linalg_svd",        "aten::_linalg_svd",
    "aten::linalg_eig", "aten::max_unpool", "aten::native_layer_norm",
};

bool is_wrong_on_meta(std::string_view op) {
  return std::any_of(std::begin(kWrongOnMeta), std::end(kWrongOnMeta),
                     [&](std::string_view prefix) { return op.starts_with(prefix); });
}

// A tensor of this dtype can lie in a slab, and its gradient be collected there.
bool fits_slab(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  if (c10::isQIntType(type) || c10::isBitsType(type)) return false;
  return !tensor.requires_grad() || !(type == at::kComplexHalf || c10::isFloat8Type(type));
}

// A tensor of the same metadata and no data of its own (Meta), or of zeros.
at::Tensor stand_in(const at::Tensor& tensor, bool on_meta) {
  // A Python number: kernels of every device take it as it is.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  at::Tensor out;
  if (on_meta) {
    out = at::empty_strided(tensor.sizes(), tensor.strides(),
                            tensor.options().device(at::kMeta).requires_grad(false));
  } else {
    int64_t extent = tensor.numel() == 0 ? 0 : 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
    out = at::zeros({std::max<int64_t>(extent, 0)}, tensor.options().requires_grad(false))
              .as_strided(tensor.sizes(), tensor.strides());
  }
  if (tensor.requires_grad() && c10::GradMode::is_enabled()) out.set_requires_grad(true);
  return out;
}

c10::IValue stand_in(const c10::IValue& value, bool on_meta) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(stand_in(value.toTensor(), on_meta)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      out.push_back(stand_in(tensor, on_meta));
    }
    return out;
  }
  if (value.isList() && value.toListRef().size() > 0 &&
      value.type()->isSubtypeOf(*c10::ListType::create(c10::OptionalType::ofTensor()))) {
    c10::List<std::optional<at::Tensor>> out;
    for (const c10::IValue& item : value.toListRef()) {
      out.push_back(item.isNone() ? std::optional<at::Tensor>()
                                  : std::optional<at::Tensor>(stand_in(item.toTensor(), on_meta)));
    }
    return out;
  }
  return value;
}

bool add_result(Draft const& draft, const at::Tensor& tensor, bool on_meta,
                std::vector<ResultMeta>& results) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || !fits_slab(tensor)) return false;
  if (tensor.is_meta() != on_meta || tensor.is_conj() || tensor.is_neg()) return false;
  auto& geometries = const_cast<Draft&>(draft).graph().geometries();
  const Geometry* geometry = geometries.intern(tensor.sizes(), tensor.strides());
  if (geometry->overlapping) geometry = geometries.intern_contiguous(tensor.sizes());
  results.push_back({geometry, tensor.scalar_type(), draft.device(), tensor.requires_grad()});
  return true;
}

}  // namespace

bool infer_results(const Draft& draft, bool on_meta, std::vector<ResultMeta>& results, bool& list) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  list = false;
  on_meta = on_meta && !is_wrong_on_meta(draft.op().name);
  Stack stack;
  for (size_t i = 0; i < draft.num_arguments(); ++i) {
    const c10::IValue& argument = draft.argument(i);
    if (argument.isDevice()) {  // results lie where the operands do
      if (argument.toDevice() != draft.device()) return false;
      stack.push_back(on_meta ? c10::Device(c10::kMeta) : argument.toDevice());
      continue;
    }
    stack.push_back(stand_in(argument, on_meta));
  }
  draft.op().handle.callBoxed(stack);
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      if (!add_result(draft, value.toTensor(), on_meta, results)) return false;
    } else if (value.isTensorList() && stack.size() == 1) {
      list = true;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (!add_result(draft, tensor, on_meta, results)) return false;
      }
    } else {
      return false;
    }
  }
  return !results.empty();
}

void infer_view(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, ViewResult& result) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::AutoGradMode no_grad(false);
  const at::Tensor& self = arguments[0].toTensor();
  const int64_t offset = self.unsafeGetTensorImpl()->storage_offset();
  int64_t end = offset + 1;
  for (int64_t d = 0; d < self.dim(); ++d) {
    end += std::max<int64_t>(self.size(d) - 1, 0) * self.stride(d);
  }
  const at::Tensor base = at::empty({end}, self.options().device(at::kMeta).requires_grad(false));
  Stack stack(arguments.begin(), arguments.end());
  stack[0] = base.as_strided(self.sizes(), self.strides(), offset);
  for (size_t i = 1; i < stack.size(); ++i) {
    if (stack[i].isTensor()) return;  // reads another tensor
  }
  op.handle.callBoxed(stack);
  result.list = stack.size() == 1 && stack[0].isTensorList();
  const auto views = result.list ? stack[0].toTensorVector() : std::vector<at::Tensor>{};
  const auto give = [&](const at::Tensor& view) {
    if (!view.is_alias_of(base) || view.scalar_type() != self.scalar_type() || view.is_conj() ||
        view.is_neg()) {
      return false;
    }
    ViewGeometry g;
    g.sizes.assign(view.sizes().begin(), view.sizes().end());
    g.strides.assign(view.strides().begin(), view.strides().end());
    g.offset = view.storage_offset();
    result.views.push_back(std::move(g));
    return true;
  };
  bool all = true;
  if (result.list) {
    for (const at::Tensor& view : views) all = all && give(view);
  } else {
    all = stack.size() == 1 && stack[0].isTensor() && give(stack[0].toTensor());
  }
  result.outcome = all ? ViewOutcome::kViews : ViewOutcome::kAsk;
}

}  // namespace autobatch

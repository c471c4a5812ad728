#include "autobatch/execute/reinterpreted_views.h"

#include "autobatch/common/compat.h"

#include <ATen/ops/_conj.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

namespace autobatch {
namespace {

int64_t reals_of(const at::Tensor& tensor) { return tensor.is_complex() ? 2 : 1; }

// Returns a real or complex tensor that contains `numel` real numbers of the tensor's storage,
// starting at the real number with index `begin`. Storage offsets of the result count from the
// start of the storage. The function is differentiable.
at::Tensor to_dtype(const at::Tensor& tensor, bool complex, int64_t begin, int64_t numel) {
  if (tensor.is_complex() == complex) return tensor;
  if (complex) return at::view_as_complex(tensor.as_strided({numel / 2, 2}, {2, 1}, begin));
  const int64_t first = begin / 2, end = (begin + numel + 1) / 2;
  return at::view_as_real(tensor.as_strided({end - first}, {1}, first)).view({-1});
}

class ReinterpretingViewFunction final : public torch::autograd::ViewFunc {
 public:
  ReinterpretingViewFunction(const at::Tensor& base, const at::Tensor& view)
      : sizes_(view.sizes()),
        strides_(view.strides()),
        reals_(reals_of(view)),
        conjugate_(view.is_conj() != base.is_conj()) {
    // The offset is relative to the start of the base, because a gradient may have another storage
    // offset.
    offset_ = view.storage_offset() * reals_ - base.storage_offset() * reals_of(base);
    int64_t last = 0;
    for (size_t d = 0; d < sizes_.size(); ++d) last += (sizes_[d] - 1) * strides_[d];
    numel_ = (last + 1) * reals_;
  }

  at::Tensor operator()(const at::Tensor& base) const override {
    // Autograd may call the function in a block, and these calls must not be captured.
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    const int64_t begin = base.storage_offset() * reals_of(base) + offset_;
    const at::Tensor memory = to_dtype(base, reals_ == 2, begin, numel_);
    const at::Tensor view = memory.as_strided(sizes_, strides_, begin / reals_);
    return conjugate_ ? at::_conj(view) : view;
  }

  std::unique_ptr<ViewFunc> clone_and_set(std::optional<std::vector<c10::SymInt>>,
                                          std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<ReinterpretingViewFunction>(*this);
  }

 private:
  at::DimVector sizes_, strides_;
  int64_t reals_;   // number of real numbers in an element of the view
  int64_t offset_;  // real numbers from the start of the base to the start of the view
  int64_t numel_;   // real numbers from the start to the end of the view
  bool conjugate_;
};

}  // namespace

at::Tensor reinterpreted(const at::Tensor& memory, const Reading& reading, int64_t offset,
                         int64_t numel) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::AutoDispatchBelowADInplaceOrView no_history;
  const int64_t reals = c10::isComplexType(reading.dtype) ? 2 : 1;
  const int64_t begin = (memory.storage_offset() + offset) * reals_of(memory);
  const at::Tensor dense =
      to_dtype(memory, reals == 2, begin, numel * reals).as_strided({numel}, {1}, begin / reals);
  return reading.conjugate ? at::_conj(dense) : dense;
}

std::unique_ptr<torch::autograd::ViewFunc> make_view_function(const at::Tensor& base,
                                                              const at::Tensor& view) {
  if (base.scalar_type() == view.scalar_type() && base.is_conj() == view.is_conj()) return nullptr;
  return std::make_unique<ReinterpretingViewFunction>(base, view);
}

}  // namespace autobatch

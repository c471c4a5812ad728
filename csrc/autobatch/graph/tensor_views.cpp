#include "autobatch/graph/tensor_views.h"

#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/free_list.h"

namespace autobatch {
namespace {

// PyTorch's TensorImpl, allocated from a free list. The free list saves time, because a flush makes
// hundreds of TensorImpls, and a batch() block makes one for each tensor that it reads.
struct ViewImpl final : c10::TensorImpl, FromFreeList<ViewImpl> {
  using c10::TensorImpl::TensorImpl;
};

}  // namespace

at::Tensor detached_alias(const at::Tensor& tensor) {
  auto impl = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/0, /*allow_tensor_metadata_change=*/false);
  impl->set_autograd_meta(nullptr);
  return at::Tensor(std::move(impl));
}

at::Tensor strided_view(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                        int64_t offset) {
  offset += buffer.storage_offset();
  if (!has_plain_views(buffer.device())) {
    // Calls the device's own kernel, below capture and autograd.
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    const at::AutoDispatchBelowADInplaceOrView no_history;
    return buffer.as_strided(sizes, strides, offset);
  }
  at::Tensor view = at::detail::make_tensor<ViewImpl>(
      c10::TensorImpl::VIEW, c10::Storage(buffer.storage()), buffer.key_set(), buffer.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

at::Tensor dense_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset) {
  return strided_view(buffer, sizes, c10::contiguous_strides(sizes), offset);
}

at::Tensor rows_view(const at::Tensor& buffer, int64_t numel, int64_t width, int64_t offset) {
  return dense_view(buffer, {width == 0 ? 0 : numel / width, width}, offset);
}

at::DimVector stacked_sizes(int64_t n, at::IntArrayRef each) {
  at::DimVector sizes{n};
  sizes.append(each.begin(), each.end());
  return sizes;
}

}  // namespace autobatch

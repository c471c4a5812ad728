#include "autobatch/capture/autocast.h"

#include <c10/core/GradMode.h>

namespace autobatch {

thread_local int CastingGuard::depth_ = 0;

at::Tensor CastCache::find(const at::Tensor& tensor, c10::ScalarType to) const {
  const auto found = entries_.find({tensor.unsafeGetTensorImpl(), to});
  if (found == entries_.end()) return {};
  const Entry& entry = found->second;
  const bool needs_grad = c10::GradMode::is_enabled() && tensor.requires_grad();
  return entry.version == tensor._version() && entry.needs_grad == needs_grad ? entry.cast
                                                                              : at::Tensor();
}

void CastCache::add(const at::Tensor& tensor, c10::ScalarType to, const at::Tensor& cast) {
  if (tensor.is_inference() || cast.is_same(tensor)) return;
  entries_[{tensor.unsafeGetTensorImpl(), to}] = {tensor, static_cast<uint32_t>(tensor._version()),
                                                  cast.requires_grad(), cast};
}

}  // namespace autobatch

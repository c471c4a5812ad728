// Finds the tensor that eager's autograd uses as the base of a view.
#pragma once

#include "autobatch/graph/graph.h"

#include <torch/csrc/autograd/variable.h>

namespace autobatch {

// Whether the value was made by `unsafe_split` or a similar op. Autograd does not treat the results
// of such ops as views.
inline bool is_unsafe_view(const Value& value) {
  return value.call != 0 && value.kind == ViewKind::kPlain;
}

// Returns the value whose tensor is the base of the view `id` in eager mode. The base is the owner
// of the memory, or the detached tensor that `id` is a view of. Returns `id` itself if it is not a
// view.
inline ValueId root_of(const Tape& tape, ValueId id) {
  for (;;) {
    const Value& value = tape.values[id];
    if (value.parent == kNone || is_unsafe_view(value)) return id;
    const bool detached = value.kind >= ViewKind::kDetached;
    if (detached && tape.values[value.parent].kind < ViewKind::kDetached) return id;
    id = value.parent;
  }
}

// Returns the base of a view that was made without autograd. Returns an undefined tensor for other
// tensors.
inline at::Tensor base_without_autograd(const at::Tensor& tensor) {
  using torch::autograd::CreationMeta;
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) return {};
  const CreationMeta how = view->get_creation_meta();
  const bool found = how == CreationMeta::NO_GRAD_MODE || how == CreationMeta::INFERENCE_MODE;
  return found ? view->get_backward_view().base_ : at::Tensor();
}

}  // namespace autobatch

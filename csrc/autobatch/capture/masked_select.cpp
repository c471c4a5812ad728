#include "autobatch/capture/masked_select.h"

#include "autobatch/capture/known_values.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/op_registry.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/nonzero.h>

#include <algorithm>

namespace autobatch {

at::Tensor record_masked_select(Scope& scope, const OpInfo& op,
                                at::ArrayRef<c10::IValue> arguments) {
  if (op.name != "aten::masked_select") return {};
  const at::Tensor& self = arguments[0].toTensor();
  const at::Tensor& mask = arguments[1].toTensor();
  if (mask.scalar_type() != at::kBool || mask.device() != self.device()) return {};
  const at::Tensor known = known_value(scope, mask);
  if (!known.defined()) return {};
  const size_t rank = static_cast<size_t>(std::max(self.dim(), mask.dim()));
  at::DimVector sizes(rank, 1);
  for (size_t d = 0; d < rank; ++d) {  // starting with the last dimension
    for (const at::IntArrayRef own : {self.sizes(), mask.sizes()}) {
      const int64_t size = d < own.size() ? own[own.size() - 1 - d] : 1;
      int64_t& common = sizes[rank - 1 - d];
      if (size != 1 && common != 1 && size != common) return {};  // eager raises the error
      if (size != 1) common = size;
    }
  }
  CellTrace::break_off("the selected elements depend on tensor values", op.name);
  at::Tensor positions;
  {
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    positions = at::nonzero(known.expand(sizes).reshape(-1)).view(-1);
  }
  return self.expand(sizes).reshape(-1).index_select(0, positions);
}

}  // namespace autobatch

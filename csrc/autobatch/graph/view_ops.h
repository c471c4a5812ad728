// Implements view ops by address arithmetic: computes the sizes, strides and offsets of the results
// in the memory of the argument. Checks the arguments as PyTorch does.
#pragma once

#include <ATen/core/ivalue.h>

#include <string_view>

namespace autobatch {

// One resulting view: sizes, strides (elements) and offset from the start of the base.
struct ViewGeometry {
  c10::SmallVector<int64_t, 6> sizes;
  c10::SmallVector<int64_t, 6> strides;
  int64_t offset = 0;
};

enum class ViewOutcome : uint8_t {
  kViews,  // `views` is filled
  kCopy,   // eager would copy (reshape of a strided tensor): `views` has the sizes of the copy
  kAsk,    // not covered, or wrong arguments: the op's Meta kernel has to decide
};

struct ViewResult {
  ViewOutcome outcome = ViewOutcome::kAsk;
  bool list = false;  // the op returns a Tensor[]
  c10::SmallVector<ViewGeometry, 4> views;
};

// Computes the views that an op returns. Argument 0 is the viewed tensor, with exact sizes, strides
// and offset.
using ViewFunction = void (*)(at::ArrayRef<c10::IValue> arguments, ViewResult& result);

// Returns the function for the op with the full name `op` ("aten::select.int"), or null.
ViewFunction find_view_function(std::string_view op);

}  // namespace autobatch

#include "autobatch/capture/number_operands.h"

#include "autobatch/cells/cell_template.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/graph/varying_numbers.h"
#include "autobatch/scope/scope.h"

#include <ATen/ops/result_type.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>
#include <limits>

namespace autobatch {
namespace {

// Whether a tensor of this dtype can hold the number without an error of PyTorch. (A number that is
// too large for float32 is infinite in eager mode.)
bool fits(const c10::Scalar& number, c10::ScalarType dtype) {
  if (dtype == at::kDouble) return true;
  if (dtype == at::kLong) return number.isIntegral(/*includeBool=*/false);
  const double value = number.toDouble();
  return dtype == at::kFloat &&
         (!std::isfinite(value) || std::abs(value) <= std::numeric_limits<float>::max());
}

c10::ScalarType type_of_result(const at::Tensor& tensor, const c10::Scalar& number) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  return at::result_type(tensor, number);
}

}  // namespace

bool call_with_number_as_tensor(Scope& scope, const OpInfo& op, torch::jit::Stack* stack) {
  const CaptureState& state = CaptureState::current();
  if (!varying_numbers_switch.is_on() || state.formula != nullptr) return false;
  if (state.trace != nullptr && !state.trace->passes_numbers()) return false;
  const auto arguments = torch::jit::last(*stack, op.num_arguments);
  const std::optional<NumberArgument> number = find_number(op, arguments);
  if (!number.has_value() || !arguments[number->other].isTensor()) return false;
  const at::Tensor& tensor = arguments[number->other].toTensor();
  if (as_pending(tensor) == nullptr && !state.captures_data) return false;
  VaryingNumbers& numbers = scope.tables().numbers;
  if (!numbers.is_passed_as_tensor(*number)) return false;
  const c10::ScalarType dtype = type_of_result(tensor, number->value);
  if (!tensor.device().is_cpu() || !fits(number->value, dtype)) return false;
  torch::jit::peek(*stack, number->index, op.num_arguments) = numbers.tensor(number->value, dtype);
  varying_numbers_switch.add_uses(1);
  number->with_tensor->handle.callBoxed(stack);
  return true;
}

}  // namespace autobatch

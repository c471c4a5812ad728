#include "autobatch/capture/number_operands.h"

#include "autobatch/cells/cell_template.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/graph/varying_numbers.h"
#include "autobatch/scope/scope.h"

namespace autobatch {
namespace {

// Whether the number can be a tensor of this dtype, which is the dtype of the other operand.
bool fits(const c10::Scalar& number, c10::ScalarType dtype) {
  if (dtype == at::kLong) return number.isIntegral(/*includeBool=*/false);
  return dtype == at::kDouble || (dtype == at::kFloat && fits_in_float32(number.toDouble()));
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
  const c10::ScalarType dtype = tensor.scalar_type();
  if (!tensor.device().is_cpu() || !fits(number->value, dtype)) return false;
  VaryingNumbers& numbers = scope.tables().numbers;
  if (!numbers.is_passed_as_tensor(*number)) return false;
  torch::jit::peek(*stack, number->index, op.num_arguments) = numbers.tensor(number->value, dtype);
  varying_numbers_switch.add_uses(1);
  number->with_tensor->handle.callBoxed(stack);
  return true;
}

}  // namespace autobatch

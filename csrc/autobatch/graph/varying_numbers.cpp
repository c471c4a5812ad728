#include "autobatch/graph/varying_numbers.h"

#include <ATen/ScalarOps.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

namespace autobatch {

Switch varying_numbers_switch(Switch::Kind::kPass, "varying_numbers");

namespace {

// If at least this many numbers of an op vary, unknown numbers of the op probably vary too.
constexpr size_t kManyVarying = 32;
// Maximum number of entries of the tables.
constexpr size_t kMostKnown = 4096;
// A number is guessed to vary at most this many times. Later calls keep the number in the
// signature, so that a flush can find out whether the number varies.
constexpr uint32_t kMostGuesses = 32;

constexpr size_t kEither = SIZE_MAX;  // the number is the first or the second argument

struct Form {
  const OpInfo* with_tensor;
  const OpInfo* of_nodes;
  size_t index, other;
};

// The two lists contain ops that run as one batch for tensors of any size, even if one operand has
// no dimensions.
// Ops whose overload for tensors also gets numbers: `x * n` calls aten::mul.Tensor.
constexpr std::array kTensorOps{"add", "sub", "mul", "div", "remainder"};
// Ops with an overload for a number.
constexpr std::array kScalarOps{"add", "sub", "mul", "div", "eq",       "ne",
                                "lt",  "le",  "gt",  "ge",  "remainder"};

using Forms = std::unordered_map<const OpInfo*, Form>;

void add_forms(Forms& forms, const std::string& op, const char* overload, size_t index) {
  const std::string in_place = op + "_";
  const OpInfo& of_nodes = find_op(op.c_str(), "Tensor");
  const OpInfo& written = find_op(in_place.c_str(), "Tensor");
  forms[&find_op(op.c_str(), overload)] = {&of_nodes, &of_nodes, index, 0};
  forms[&find_op(in_place.c_str(), overload)] = {&written, &of_nodes, index, 0};
}

Forms make_forms() {
  Forms forms;
  for (const char* op : kTensorOps) add_forms(forms, "aten::" + std::string(op), "Tensor", kEither);
  for (const char* op : kScalarOps) add_forms(forms, "aten::" + std::string(op), "Scalar", 1);
  const OpInfo& where = find_op("aten::where", "self");
  forms[&find_op("aten::where", "ScalarOther")] = {&where, &where, 2, 1};
  forms[&find_op("aten::where", "ScalarSelf")] = {&where, &where, 1, 2};
  return forms;
}

bool is_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// Returns the number that PyTorch has wrapped in a tensor. If the dtype is neither float64 nor
// int64, returns a boolean, because find_number() rejects booleans.
c10::Scalar wrapped_number(const at::Tensor& tensor) {
  const void* number = tensor.const_data_ptr();
  if (tensor.scalar_type() == at::kDouble) return *static_cast<const double*>(number);
  if (tensor.scalar_type() == at::kLong) return *static_cast<const int64_t*>(number);
  return false;
}

}  // namespace

std::optional<NumberArgument> find_number(const OpInfo& op, at::ArrayRef<c10::IValue> arguments) {
  static const Forms forms = make_forms();
  const auto found = forms.find(&op);
  if (found == forms.end()) return {};
  const Form& form = found->second;
  NumberArgument number{form.with_tensor, form.of_nodes, form.index, form.other, {}};
  if (form.index == kEither) {
    const bool is_left = is_number(arguments[0]);
    if (is_left == is_number(arguments[1])) return {};
    number.index = is_left ? 0 : 1;
    number.other = is_left ? 1 : 0;
    number.value = wrapped_number(arguments[number.index].toTensor());
  } else {
    number.value = arguments[form.index].toScalar();
  }
  if (number.value.isSymbolic() || number.value.isBoolean() || number.value.isComplex()) return {};
  // Zero stays a number: Python's sum() begins with `0 + x`, and fuse_sums looks for this zero.
  if (std::isnan(number.value.toDouble()) || number.value.equal(0)) return {};
  return number;
}

bool fits_in_float32(double number) {
  return !std::isfinite(number) || std::abs(number) <= std::numeric_limits<float>::max();
}

VaryingNumbers::State VaryingNumbers::state(const OpInfo& op, double number) const {
  const auto numbers = ops_.find(&op);
  if (numbers == ops_.end()) return State::kUnknown;
  const auto found = numbers->second.states.find(number);
  return found == numbers->second.states.end() ? State::kUnknown : found->second;
}

bool VaryingNumbers::is_passed_as_tensor(const NumberArgument& number) {
  const double value = number.value.toDouble();
  const auto found = ops_.find(number.of_nodes);
  const State known = state(*number.of_nodes, value);
  if (known != State::kUnknown) return known == State::kVarying;
  std::unordered_set<double>& in_signatures = in_signatures_[number.of_nodes];
  if (in_signatures.size() >= kMostKnown) in_signatures.clear();
  const bool may_vary = found != ops_.end() && found->second.num_varying >= kManyVarying;
  if (may_vary && in_signatures.count(value) == 0) {
    auto& guesses = found->second.guesses;
    if (guesses.size() >= kMostKnown) guesses.clear();
    if (++guesses[value] <= kMostGuesses) return true;
  }
  in_signatures.insert(value);
  return false;
}

at::Tensor VaryingNumbers::tensor(const c10::Scalar& number, c10::ScalarType dtype) {
  const bool is_integer = number.isIntegral(/*includeBool=*/false);
  const auto bits = is_integer ? static_cast<uint64_t>(number.toLong())
                               : std::bit_cast<uint64_t>(number.toDouble());
  if (tensors_.size() >= kMostKnown) tensors_.clear();
  at::Tensor& tensor = tensors_[{is_integer ? bits : ~bits, dtype}];
  if (!tensor.defined()) {
    const c10::InferenceMode ordinary(false);  // autograd may save the tensor in later calls
    tensor = at::detail::scalar_tensor_static(number, dtype, c10::kCPU);
  }
  return tensor;
}

void VaryingNumbers::mark(const Signature& signature, bool is_passed_as_tensor) {
  signatures_[&signature] = is_passed_as_tensor;
  ++version_;
}

void VaryingNumbers::add_varying(const OpInfo& op, double number) {
  Numbers& numbers = ops_[&op];
  if (numbers.num_varying >= kMostKnown) {
    std::erase_if(numbers.states, [](const auto& n) { return n.second == State::kVarying; });
    numbers.num_varying = kManyVarying;  // unknown numbers are still guessed to vary
  }
  numbers.states[number] = State::kVarying;
  ++numbers.num_varying;
}

void VaryingNumbers::add_fixed(const OpInfo& op, double number) {
  ops_.at(&op).states[number] = State::kFixed;
}

}  // namespace autobatch

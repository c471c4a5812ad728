#include "autobatch/graph/varying_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

namespace autobatch {

Switch varying_numbers_switch(Switch::Kind::kPass, "varying_numbers");

namespace {

// If so many numbers of an op vary, unknown numbers of the op probably vary too.
constexpr size_t kManyVarying = 32;
// Maximum number of numbers of an op whose state is kept.
constexpr size_t kMostKnown = 4096;
// Numbers of guesses that are examined together. After the last examination, guesses are assumed to
// be right.
constexpr size_t kFewestGuesses = 8, kMostGuesses = 4096;

constexpr size_t kEither = SIZE_MAX;  // the number is the first or the second argument

struct Form {
  const OpInfo* of_nodes;
  const OpInfo* with_tensor;
  size_t index, other;
};

// Ops that are called with a number in place of a tensor: `x * n` calls aten::mul.Tensor.
constexpr std::array kTensorOps{"add", "sub", "mul", "div", "remainder", "fmod"};
// Ops with an overload for a number.
constexpr std::array kScalarOps{"add", "sub", "mul", "div", "eq",        "ne",
                                "lt",  "le",  "gt",  "ge",  "remainder", "fmod"};

using Forms = std::unordered_map<const OpInfo*, Form>;

void add_forms(Forms& forms, const std::string& op, const char* overload, size_t index) {
  const std::string in_place = op + "_";
  const OpInfo& of_nodes = find_op(op.c_str(), overload);
  const OpInfo& with_tensor = find_op(op.c_str(), "Tensor");
  forms[&of_nodes] = {&of_nodes, &with_tensor, index, 0};
  forms[&find_op(in_place.c_str(), overload)] = {&of_nodes, &find_op(in_place.c_str(), "Tensor"),
                                                 index, 0};
}

Forms make_forms() {
  Forms forms;
  for (const char* op : kTensorOps) add_forms(forms, "aten::" + std::string(op), "Tensor", kEither);
  for (const char* op : kScalarOps) add_forms(forms, "aten::" + std::string(op), "Scalar", 1);
  add_forms(forms, "aten::masked_fill", "Scalar", 2);
  const OpInfo& floor_divide = find_op("aten::floor_divide", "");
  forms[&floor_divide] = {&floor_divide, &floor_divide, kEither, 0};
  const OpInfo& rsub = find_op("aten::rsub", "Scalar");
  forms[&rsub] = {&rsub, &find_op("aten::rsub", "Tensor"), 1, 0};
  const OpInfo& where = find_op("aten::where", "self");
  const OpInfo& other = find_op("aten::where", "ScalarOther");
  const OpInfo& self = find_op("aten::where", "ScalarSelf");
  forms[&other] = {&other, &where, 2, 1};
  forms[&self] = {&self, &where, 1, 2};
  return forms;
}

bool is_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// Returns the number that PyTorch has wrapped in a tensor. A boolean stands for other dtypes.
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
  NumberArgument number{form.of_nodes, form.with_tensor, form.index, form.other, {}};
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
  if (std::isnan(number.value.toDouble())) return {};
  return number;
}

VaryingNumbers::State VaryingNumbers::state(const OpInfo& op, double number) const {
  const auto numbers = ops_.find(&op);
  if (numbers == ops_.end()) return State::kUnknown;
  const auto found = numbers->second.states.find(number);
  return found == numbers->second.states.end() ? State::kUnknown : found->second;
}

bool VaryingNumbers::is_passed_as_tensor(const NumberArgument& number) {
  const auto found = ops_.find(number.of_nodes);
  if (found == ops_.end()) return false;
  Numbers& numbers = found->second;
  const double value = number.value.toDouble();
  const auto known = numbers.states.find(value);
  if (known != numbers.states.end()) return known->second == State::kVarying;
  if (numbers.num_varying < kManyVarying) return false;
  if (numbers.examined_at <= kMostGuesses) {
    ++numbers.num_guesses;
    numbers.guesses[value] = value;
    numbers.guesses[static_cast<float>(value)] = value;
  }
  return true;
}

void VaryingNumbers::add_varying(const OpInfo& op, const OpInfo& with_tensor, double number,
                                 at::ArrayRef<const Signature*> signatures) {
  signatures_.insert(signatures.begin(), signatures.end());
  ++version_;
  Numbers& numbers =
      ops_.try_emplace(&op, Numbers{&with_tensor, {}, 0, {}, 0, kFewestGuesses}).first->second;
  if (numbers.num_varying >= kMostKnown) {
    std::erase_if(numbers.states, [](const auto& n) { return n.second == State::kVarying; });
    numbers.num_varying = kManyVarying;  // unknown numbers are still passed as tensors
  }
  numbers.states[number] = State::kVarying;
  ++numbers.num_varying;
}

void VaryingNumbers::add_fixed(const OpInfo& op, double number) {
  ops_.at(&op).states[number] = State::kFixed;
}

std::unordered_map<const OpInfo*, const OpInfo*> VaryingNumbers::guessed_ops() const {
  std::unordered_map<const OpInfo*, const OpInfo*> out;
  for (const auto& [op, numbers] : ops_) {
    if (numbers.num_guesses >= numbers.examined_at) out[numbers.with_tensor] = op;
  }
  return out;
}

std::optional<double> VaryingNumbers::guessed_number(const OpInfo& op,
                                                     const at::Tensor& tensor) const {
  const void* data = tensor.const_data_ptr();
  double value = 0;
  if (tensor.scalar_type() == at::kFloat) {
    value = *static_cast<const float*>(data);
  } else if (tensor.scalar_type() == at::kDouble) {
    value = *static_cast<const double*>(data);
  } else if (tensor.scalar_type() == at::kLong) {
    value = static_cast<double>(*static_cast<const int64_t*>(data));
  } else {
    return {};
  }
  const auto& guesses = ops_.at(&op).guesses;
  const auto found = guesses.find(value);
  return found == guesses.end() ? std::optional<double>() : found->second;
}

// If no guess was wrong, the next examination is later.
void VaryingNumbers::end_guesses(const OpInfo& op, bool found_fixed) {
  Numbers& numbers = ops_.at(&op);
  numbers.guesses.clear();
  numbers.num_guesses = 0;
  numbers.examined_at = found_fixed ? kFewestGuesses : 2 * numbers.examined_at;
}

}  // namespace autobatch

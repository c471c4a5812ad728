#include "autobatch/derivatives/derivative_formula.h"

#include "autobatch/capture/record_call.h"
#include "autobatch/capture/shape_inference.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/rules/rule.h"
#include "autobatch/scope/scope.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

using torch::jit::Stack;

constexpr size_t kMostFormulas = 16384;

constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, compat::kDeferKey);

bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// Sets the argument that `input` describes to `tensor`. If the argument is a list, sets only one
// element of the list.
void put(Stack& arguments, const Formula::Input& input, const at::Tensor& tensor) {
  c10::IValue& argument = arguments[input.argument];
  if (input.element == kNone) {
    argument = tensor;
  } else {
    argument.toList().set(input.element, tensor);
  }
}

// Returns a sample tensor with the value's geometry, dtype and device, in new memory. `as_matrix`:
// whether the sample is nearly the identity matrix. This is necessary if the op fails for singular
// matrices.
at::Tensor sample_of(const Value& value, bool as_matrix) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::NoGradGuard no_grad;
  const Geometry& g = *value.geometry;
  // Samples of integer tensors are zeros, because the op may use the integers as indices, and 0 is
  // always a valid index.
  const int fill = c10::isIntegralType(value.dtype, /*includeBool=*/true) ? 0 : 1;
  const at::Tensor sample = at::full({std::max<int64_t>(g.extent, 1)}, fill, value.options())
                                .as_strided(g.sizes, g.strides, 0)
                                .detach();
  if (as_matrix && is_matrix(sample)) fill_with_identity(sample);
  return sample;
}

std::vector<at::Tensor> samples_of(const FormulaRequest& request) {
  std::vector<at::Tensor> operands;
  for (size_t slot = 0; slot < request.operands.size(); ++slot) {
    const Value* value = request.operands[slot];
    operands.push_back(value == nullptr
                           ? at::Tensor()
                           : sample_of(*value, request.signature->op->fails_for_values));
    if (request.wanted[slot] != 0) operands.back().set_requires_grad(true);
  }
  return operands;
}

at::Tensor gradient_of(const Value& result) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  return at::ones(result.geometry->sizes, result.options());
}

Formula trace(const FormulaRequest& request) {
  const Signature& signature = *request.signature;
  const std::vector<at::Tensor> operands = samples_of(request);
  std::vector<at::Tensor> computed, gradients;
  FormulaTrace trace;
  for (const at::Tensor& operand : operands) trace.add_input(operand);
  for (const Value& result : request.results) {
    computed.push_back(sample_of(result, signature.op->fails_for_values));
    trace.add_input(computed.back());
  }
  for (size_t k = 0; k < request.results.size(); ++k) {
    gradients.push_back(request.given[k] != 0 ? gradient_of(request.results[k]) : at::Tensor());
    trace.add_input(gradients.back());
  }
  trace.end_inputs();
  std::vector<at::Tensor> results;
  {
    const ContextGuard context(signature.context);
    const at::AutoGradMode grad_mode(signature.context.grad_mode);
    results = signature.rule->replay(signature, operands, computed);
  }
  std::vector<at::Tensor> roots, seeds, inputs;
  for (uint32_t k = 0; k < results.size() && k < request.results.size(); ++k) {
    trace.set_known(results[k], static_cast<uint32_t>(operands.size()) + k);
    if (request.given[k] == 0 || !results[k].requires_grad()) continue;
    roots.push_back(results[k]);
    seeds.push_back(gradients[k]);
  }
  std::vector<uint32_t> numbers(operands.size(), kNone);
  for (size_t slot = 0; slot < operands.size(); ++slot) {
    if (request.wanted[slot] != 0) inputs.push_back(operands[slot]);
  }
  if (roots.empty() || inputs.empty()) return trace.finish(std::move(numbers));
  trace.note_composites();
  const auto found = torch::autograd::grad(roots, inputs, seeds, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  for (size_t slot = 0, i = 0; slot < operands.size(); ++slot) {
    if (request.wanted[slot] == 0) continue;
    const at::Tensor& gradient = found[i++];
    if (!gradient.defined()) continue;
    TORCH_CHECK(gradient.sizes() == operands[slot].sizes());
    numbers[slot] = trace.number_of(gradient);
    TORCH_CHECK(numbers[slot] != kNone);
  }
  return trace.finish(std::move(numbers));
}

}  // namespace

std::vector<at::Tensor> Formula::apply(at::ArrayRef<at::Tensor> inputs) const {
  std::vector<at::Tensor> tensors(inputs.begin(), inputs.end());
  tensors.resize(num_tensors);
  Stack stack;
  for (const Step& step : steps) {
    stack.clear();
    for (const c10::IValue& argument : step.arguments) {
      stack.push_back(argument.isList() ? c10::IValue(argument.toList().copy()) : argument);
    }
    for (const Input& input : step.tensors) put(stack, input, tensors[input.number]);
    step.op->handle.callBoxed(stack);
    uint32_t next = step.first;
    for (const c10::IValue& result : stack) {
      if (result.isTensor()) {
        tensors[next++] = result.toTensor();
      } else {
        for (const at::Tensor& tensor : result.toTensorVector()) tensors[next++] = tensor;
      }
    }
  }
  std::vector<at::Tensor> found;
  for (const uint32_t number : gradients) {
    found.push_back(number == kNone ? at::Tensor() : tensors[number]);
  }
  return found;
}

// --- the cache ---

Key FormulaRequest::key() const {
  Key key{reinterpret_cast<uint64_t>(signature)};
  const auto add = [&](const Value& value, uint8_t flag) {
    key.push_back(reinterpret_cast<uint64_t>(value.geometry));
    key.push_back(static_cast<uint64_t>(value.dtype) << 16 |
                  static_cast<uint64_t>(value.device.type()) << 8 | flag);
  };
  for (size_t slot = 0; slot < operands.size(); ++slot) {
    operands[slot] == nullptr ? key.push_back(0) : add(*operands[slot], wanted[slot]);
  }
  for (size_t k = 0; k < results.size(); ++k) add(results[k], given[k]);
  return key;
}

const Formula* FormulaTable::find(Scope& scope, const FormulaRequest& request) {
  const Key key = request.key();
  const uint64_t hash = hash_key(key);
  const auto [first, last] = entries_.equal_range(hash);
  for (auto entry = first; entry != last; ++entry) {
    if (entry->second.key == key) return entry->second.formula.get();
  }
  std::unique_ptr<const Formula> formula;
  try {
    const at::ThreadLocalStateGuard clean_state(scope.clean_state());
    const c10::impl::IncludeDispatchKeyGuard noted(compat::kDeferKey);
    const c10::InferenceMode no_inference(false);
    const at::AutoGradMode grad_mode(true);
    formula = std::make_unique<const Formula>(trace(request));
  } catch (const std::exception& error) {  // there is no formula, so autograd runs
    if (host_interrupts(error)) throw;
  }
  // If the table is full, most calls probably have new sizes and do not use the cached formulas.
  if (entries_.size() >= kMostFormulas) entries_.clear();
  return entries_.emplace(hash, Entry{key, std::move(formula)})->second.formula.get();
}

// --- recording calls ---

FormulaTrace::FormulaTrace() { CaptureState::current().formula = this; }

FormulaTrace::~FormulaTrace() { CaptureState::current().formula = nullptr; }

uint32_t FormulaTrace::add_input(const at::Tensor& tensor) {
  const uint32_t number = formula_.num_tensors++;
  stands_for_.push_back(number);
  if (tensor.defined()) add(tensor, number);
  return number;
}

void FormulaTrace::add(const at::Tensor& tensor, uint32_t number) {
  by_object_[tensor.unsafeGetTensorImpl()] = number;
  by_memory_[tensor.storage().unsafeGetStorageImpl()].push_back({tensor, number});
}

void FormulaTrace::set_known(const at::Tensor& tensor, uint32_t input) {
  const uint32_t number = tensor.defined() ? number_of(tensor) : kNone;
  if (number != kNone && number >= formula_.num_inputs) stands_for_[number] = input;
}

uint32_t FormulaTrace::number_of(const at::Tensor& tensor) const {
  const auto object = by_object_.find(tensor.unsafeGetTensorImpl());
  if (object != by_object_.end()) return stands_for_[object->second];
  const auto memory = by_memory_.find(tensor.storage().unsafeGetStorageImpl());
  if (memory == by_memory_.end()) return kNone;
  for (const Known& known : memory->second) {
    if (known.tensor.sizes() == tensor.sizes() && known.tensor.strides() == tensor.strides() &&
        known.tensor.storage_offset() == tensor.storage_offset() &&
        known.tensor.scalar_type() == tensor.scalar_type()) {
      return stands_for_[known.number];
    }
  }
  return kNone;
}

void FormulaTrace::run(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.num_arguments);
  const Action action = op.action_on(arguments);
  if (action == Action::kDecompose || (op.composite && !notes_composites_)) {
    op.handle.redispatchBoxed(keys & kBelow, stack);  // the called ops are dispatched to run()
    return;
  }
  // The check is not recorded, because forward of the op makes the same check. The check does not
  // run here either, because a sample may be singular.
  if (op.name == "aten::_linalg_check_errors") return torch::jit::drop(*stack, op.num_arguments);
  if (op.name == "aten::fill_.Scalar" && fills_new(arguments)) {
    return op.handle.redispatchBoxed(keys & kBelow, stack);
  }
  const bool in_place = action == Action::kMutate;
  const bool is_view = op.handle.hasTag(at::Tag::inplace_view);
  TORCH_CHECK(action != Action::kAtOnce && !op.random, op.name, " depends on values");
  TORCH_CHECK(
      !in_place || ((is_view || op.write == WriteKind::kCompute) && op.functional.has_value()),
      op.name, " writes to its arguments");
  Formula::Step step;
  step.op = in_place ? &op_info(*op.functional) : &op;
  if (action != Action::kMetadata) note(step, arguments);
  {
    const c10::impl::ExcludeDispatchKeyGuard not_noted(compat::kDeferKey);
    op.handle.redispatchBoxed(keys & kBelow, stack);
  }
  if (action == Action::kMetadata) return;
  step.first = formula_.num_tensors;
  for (const c10::IValue& result : torch::jit::last(*stack, op.handle.schema().returns().size())) {
    note_results(result, in_place && !is_view);
  }
  step.count = formula_.num_tensors - step.first;
  formula_.steps.push_back(std::move(step));
}

// Returns true if the call fills a tensor that a recorded call has created. The recorded call is
// then replaced by a call that creates a filled tensor. (In C++, `1 - x` is
// `empty_like(x).fill_(1).sub_(x)`.)
bool FormulaTrace::fills_new(at::ArrayRef<c10::IValue> arguments) {
  const uint32_t number = number_of(arguments[0].toTensor());
  for (Formula::Step& step : formula_.steps) {
    if (number == kNone || step.first != number || step.op->name != "aten::empty_like") continue;
    step.op = &find_op("aten::full_like", "");
    step.arguments.insert(step.arguments.begin() + 1, arguments[1]);
    return true;
  }
  return false;
}

void FormulaTrace::note(Formula::Step& step, at::ArrayRef<c10::IValue> arguments) const {
  const auto note_tensor = [&](const at::Tensor& tensor, uint32_t argument, uint32_t element) {
    if (!tensor.defined() || is_number(tensor)) return false;
    const uint32_t number = number_of(tensor);
    TORCH_CHECK(number != kNone, step.op->name, " reads a tensor of unknown origin");
    step.tensors.push_back({argument, element, number});
    return true;
  };
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = arguments[i];
    if (argument.isTensor()) {
      const bool noted = note_tensor(argument.toTensor(), i, kNone);
      step.arguments.push_back(noted ? c10::IValue() : argument);
    } else if (argument.isList()) {
      auto list = argument.toList().copy();
      for (uint32_t e = 0; e < list.size(); ++e) {
        const c10::IValue item = list.get(e);
        if (!item.isTensor() || !note_tensor(item.toTensor(), i, e)) continue;
        list.set(e, argument.isTensorList() ? c10::IValue(at::Tensor()) : c10::IValue());
      }
      step.arguments.emplace_back(std::move(list));
    } else {
      step.arguments.push_back(argument);
    }
  }
}

void FormulaTrace::note_results(const c10::IValue& result, bool in_place) {
  const auto add_result = [&](const at::Tensor& tensor) {
    const uint32_t number = formula_.num_tensors++;
    stands_for_.push_back(number);
    if (!tensor.defined()) return;
    if (in_place) {
      // The write would also change any other known tensor with the same memory. If there is such a
      // tensor, the trace fails.
      auto& known = by_memory_[tensor.storage().unsafeGetStorageImpl()];
      for (Known& other : known) {
        TORCH_CHECK(other.number >= formula_.num_inputs && other.tensor.is_same(tensor),
                    "it writes to memory that it has read before");
      }
      known.clear();
    }
    add(tensor, number);
  };
  TORCH_CHECK(result.isTensor() || result.isTensorList(), "a result is not a tensor");
  if (result.isTensor()) return add_result(result.toTensor());
  for (const at::Tensor& tensor : result.toTensorVector()) add_result(tensor);
}

Formula FormulaTrace::finish(std::vector<uint32_t> gradients) {
  std::vector<uint8_t> needed(formula_.num_tensors, 0);
  for (const uint32_t number : gradients) {
    if (number != kNone) needed[number] = 1;
  }
  for (auto step = formula_.steps.rbegin(); step != formula_.steps.rend(); ++step) {
    const auto first = needed.begin() + step->first;
    if (std::none_of(first, first + step->count, [](uint8_t n) { return n != 0; })) {
      step->op = nullptr;
      continue;
    }
    for (const Formula::Input& input : step->tensors) needed[input.number] = 1;
  }
  std::erase_if(formula_.steps, [](const Formula::Step& step) { return step.op == nullptr; });
  formula_.reads.assign(needed.begin(), needed.begin() + formula_.num_inputs);
  formula_.gradients = std::move(gradients);
  return std::move(formula_);
}

}  // namespace autobatch

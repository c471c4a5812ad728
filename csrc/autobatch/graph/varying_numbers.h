// Numbers that differ between the examples of a block, such as the length n of a sentence in
// `x.sum(0) / n`. A number is part of a signature, so calls with different numbers cannot share a
// batch.
// If a flush finds an op whose numbers differ between nodes that could share a batch
// (plan/find_varying_numbers.h), later calls pass the number as a tensor
// (capture/number_operands.h). Numbers that are the same in all examples (`x * 0.5`) stay in the
// signature.
#pragma once

#include "autobatch/common/switches.h"
#include "autobatch/export.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Scalar.h>

#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace autobatch {

extern Switch varying_numbers_switch;

// The number among the arguments of a call.
struct NumberArgument {
  const OpInfo* with_tensor;  // the op that takes the number as a tensor
  const OpInfo* of_nodes;     // the op of the nodes that such a call adds; `mul` for `mul_`
  size_t index;               // position of the number
  size_t other;               // position of a tensor that the op combines with the number
  c10::Scalar value;
};

// Returns the number among the arguments of a call, if the op has an overload in which a tensor
// without dimensions has the same effect as the number. Returns nothing for other ops, for calls
// without a number, and for zero, NaN, booleans and complex numbers. `arguments` are the arguments
// of a call or of a signature.
std::optional<NumberArgument> find_number(const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

// Whether a float32 tensor can be made from the number. Returns false for finite numbers that are
// too large for float32: an op that gets such a number computes with infinity, but a tensor cannot
// be made from it.
AUTOBATCH_INTERNAL bool fits_in_float32(double number);

// What is known about the numbers of each op. An op is identified by NumberArgument::of_nodes.
class VaryingNumbers {
 public:
  enum class State : uint8_t {
    kUnknown,
    kFixed,    // several examples have this number, so it stays in the signature
    kVarying,  // passed as a tensor
  };

  // Whether no number is passed as a tensor.
  bool empty() const { return ops_.empty() || !varying_numbers_switch.is_on(); }
  // Changes whenever a number starts to vary.
  uint64_t version() const { return varying_numbers_switch.is_on() ? version_ : 0; }
  // Whether some number of the op varies.
  bool contains(const OpInfo& op) const { return ops_.count(&op) != 0; }
  // Whether later calls pass the number of the signature as a tensor. New nodes should then not
  // have this signature.
  bool contains(const Signature& signature) const {
    const auto found = signatures_.find(&signature);
    return found != signatures_.end() && found->second;
  }
  // Whether mark() was called for the signature.
  bool is_marked(const Signature& signature) const { return signatures_.count(&signature) != 0; }
  State state(const OpInfo& op, double number) const;
  // Whether this call passes its number as a tensor. If many numbers of the op vary, a number that
  // is in no signature yet is guessed to vary too. Must be called for each new call with a number.
  bool is_passed_as_tensor(const NumberArgument& number);
  // Returns the tensor that replaces the number. Returns the same tensor for the same number, so
  // that the cache of calls recognises calls with the same number.
  at::Tensor tensor(const c10::Scalar& number, c10::ScalarType dtype);

  void add_varying(const OpInfo& op, double number);
  // Must only be called if a number of the op varies.
  void add_fixed(const OpInfo& op, double number);
  // Records that the number of the signature varies. `is_passed_as_tensor`: whether later calls
  // pass the number as a tensor.
  void mark(const Signature& signature, bool is_passed_as_tensor);

 private:
  struct Numbers {
    std::unordered_map<double, State> states;
    size_t num_varying = 0;
    std::unordered_map<double, uint32_t> guesses;  // by number: how often it was guessed to vary
  };

  std::unordered_map<const OpInfo*, Numbers> ops_;  // the ops with a number that varies
  std::unordered_map<const OpInfo*, std::unordered_set<double>> in_signatures_;
  std::unordered_map<const Signature*, bool> signatures_;  // the arguments of mark()
  std::map<std::pair<uint64_t, c10::ScalarType>, at::Tensor> tensors_;
  uint64_t version_ = 0;
};

}  // namespace autobatch

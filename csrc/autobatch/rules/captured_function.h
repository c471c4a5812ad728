// Calls of custom autograd.Functions whose forward was captured op by op. A call is a node of the
// op `autobatch::function_results`, which returns the results of forward unchanged. The backward of
// the node is the Function's own backward. The host language runs it for all members of a batch.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace autobatch {

// The properties of a call that all members of a batch have in common.
struct FunctionTraits {
  std::string name;  // for reports and errors: "GradientReversal.apply"
  // Whether the result shares the memory of an argument, as in `return x.view_as(x)`.
  bool shares_memory = false;
  bool saves = false;                  // whether the call saved tensors for backward
  std::vector<uint8_t> saved_results;  // by result: whether the call saved the result
  // By tensor argument. 0: not saved; 1: saved; 2: saved, and the FunctionCall holds the tensor.
  std::vector<uint8_t> saved_inputs;

  auto operator<=>(const FunctionTraits&) const = default;
};

// One call, as the host language describes it. The nodes refer to the call by its number.
class AUTOBATCH_INTERNAL FunctionCall {
 public:
  FunctionCall();
  virtual ~FunctionCall();
  FunctionCall(const FunctionCall&) = delete;
  FunctionCall& operator=(const FunctionCall&) = delete;

  int64_t number() const { return number_; }
  // Registers the call under its number. The registration ends when the call is destroyed.
  static void add(const std::shared_ptr<FunctionCall>& call);

 private:
  int64_t number_;
};

// Returns the call with this number, or null. No call has the number zero or one, because these
// numbers occur in sample tensors.
std::shared_ptr<FunctionCall> find_call(int64_t number);

// One tensor of each member of a batch. `flat` contains the elements of all members. It is
// undefined if the members do not have the tensor.
struct MemberTensors {
  at::Tensor flat;
  std::vector<at::IntArrayRef> sizes;  // by member: the sizes of its tensor
  bool requires_grad = false;          // whether the tensors require grad in forward
};

// The calls of a batch in backward.
struct FunctionBackward {
  std::vector<std::shared_ptr<FunctionCall>> calls;
  std::vector<MemberTensors> results;  // undefined where the calls did not save the result
  // An entry is undefined if the calls did not save the input, or if the input was not pending.
  std::vector<MemberTensors> inputs;
  std::vector<MemberTensors> gradients;  // the gradients of the results
  std::vector<uint8_t> wanted;           // by input: whether its gradient is needed
  std::vector<uint8_t> shared;           // by input: whether all members have the same tensor
};

// The gradients of one input. `flat` contains the gradients for `members`, one after another. If
// all members have the same tensor as input, `flat` contains the sum of the gradients.
struct InputGradient {
  std::vector<size_t> members;
  at::Tensor flat;
};

// The functions that the host language provides for these calls.
struct FunctionHost {
  // Runs backward of the calls. Returns one InputGradient for each input.
  std::function<std::vector<InputGradient>(const FunctionBackward&)> backward;
  // Returns copies of `results` with the call as their history, or views if the result shares
  // memory with an argument. Autograd records the call if grad mode is on. The tensors are not
  // pending.
  std::function<std::vector<at::Tensor>(const std::shared_ptr<FunctionCall>&,
                                        at::TensorList results, at::TensorList inputs)>
      reapply;
};
AUTOBATCH_INTERNAL void set_function_host(FunctionHost host);

// Returns the op for calls with these traits. Its arguments are (results, number, inputs), where
// `results` are the results of forward without a history, and `number` is a tensor. The OpInfo is
// never freed, and its `is_function` is true.
AUTOBATCH_INTERNAL const OpInfo& function_results_op(const FunctionTraits& traits);

}  // namespace autobatch

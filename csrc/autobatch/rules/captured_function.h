// Calls of custom autograd.Functions whose forward was captured op by op. A call is a node of the
// op `autobatch::function_results`, which passes the results of forward on. The gradient of the
// node is the Function's own backward, which the host runs for all members of a batch.
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
  std::vector<uint8_t> saved_results;  // by result: whether the call saved it for backward
  // By tensor argument. 0: not saved; 1: saved; 2: saved, and the FunctionCall holds the tensor.
  std::vector<uint8_t> saved_inputs;

  auto operator<=>(const FunctionTraits&) const = default;
};

// One call, as the host describes it. The nodes refer to it by its number.
class AUTOBATCH_INTERNAL FunctionCall {
 public:
  FunctionCall();
  virtual ~FunctionCall();
  FunctionCall(const FunctionCall&) = delete;
  FunctionCall& operator=(const FunctionCall&) = delete;

  int64_t number() const { return number_; }
  // Registers the call under its number, as long as it exists.
  static void add(const std::shared_ptr<FunctionCall>& call);

 private:
  int64_t number_;
};

// Returns the call with this number, or null. Zero and one are no numbers of calls, because ops are
// also run on sample tensors.
std::shared_ptr<FunctionCall> find_call(int64_t number);

// One tensor of each member of a batch. `flat` contains the elements of all members; undefined if
// the members have no such tensor.
struct MemberTensors {
  at::Tensor flat;
  std::vector<at::IntArrayRef> sizes;  // by member
  bool requires_grad = false;          // of the tensors in forward
};

// The calls of a batch in backward.
struct FunctionBackward {
  std::vector<std::shared_ptr<FunctionCall>> calls;
  std::vector<MemberTensors> results;  // undefined where the calls did not save the result
  // Undefined where the calls did not save the input, or where it was not pending.
  std::vector<MemberTensors> inputs;
  std::vector<MemberTensors> gradients;  // by result
  std::vector<uint8_t> wanted;           // by input: whether a gradient is needed
  std::vector<uint8_t> shared;           // by input: whether all members have the same tensor
};

// The gradients of one input: the elements for `members`, one after another. If all members have
// the same tensor as input: the sum of the gradients.
struct InputGradient {
  std::vector<size_t> members;
  at::Tensor flat;
};

// What the host's language does for these calls.
struct FunctionHost {
  // Runs backward of the calls. Returns the gradients by input.
  std::function<std::vector<InputGradient>(const FunctionBackward&)> backward;
  // Returns copies of `results` (views if they share memory) with the call as their history.
  // Autograd records the call if grad mode is on. No tensor is pending.
  std::function<std::vector<at::Tensor>(const std::shared_ptr<FunctionCall>&,
                                        at::TensorList results, at::TensorList inputs)>
      reapply;
};
AUTOBATCH_INTERNAL void set_function_host(FunctionHost host);

// Returns the op for calls with these traits. Its arguments are (results, number, inputs), where
// `results` are the results of forward without a history, and `number` is a tensor. The OpInfo is
// never freed, and has OpInfo::is_function.
AUTOBATCH_INTERNAL const OpInfo& function_results_op(const FunctionTraits& traits);

}  // namespace autobatch

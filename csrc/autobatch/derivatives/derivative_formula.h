// Represents the gradient of a captured op as a list of ops. This list is the formula that autograd
// itself uses. To find the formula, the op runs once on sample tensors, and autograd's engine runs
// the backward of this call. FormulaTrace records each op that the engine calls. To compute the
// gradient of a node, the recorded ops are called with the tensors of this node. These calls are
// captured like any other call (captured_gradient.h).
//
// If an op that reads values or draws random numbers is called, there is no formula, because the
// recorded list of ops would be valid only for these values. Dropout has a formula, because its
// replay uses the mask that forward has stored.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <memory>
#include <unordered_map>
#include <vector>

namespace autobatch {

class Scope;

// A list of calls. Tensors are numbered in this order: the node's operands, its results, the
// gradients of its results, and the results of the steps.
struct Formula {
  struct Input {
    uint32_t argument = 0;
    uint32_t element = kNone;  // index in the argument, if the argument is a list
    uint32_t number = 0;
  };
  struct Step {
    const OpInfo* op = nullptr;
    std::vector<c10::IValue> arguments;  // the tensors in `tensors` are missing
    std::vector<Input> tensors;
    uint32_t first = 0;  // number of its first result
    uint32_t count = 0;
  };

  uint32_t num_inputs = 0;
  uint32_t num_tensors = 0;
  std::vector<Step> steps;
  std::vector<uint32_t> gradients;  // by operand: number of its gradient, or kNone
  std::vector<uint8_t> reads;       // by input number: whether a step reads the input

  // Calls the steps. Returns a gradient for each operand. A gradient may be undefined. An input may
  // be undefined if no step reads it.
  std::vector<at::Tensor> apply(at::ArrayRef<at::Tensor> inputs) const;
};

// The properties of a node that determine its formula.
struct FormulaRequest {
  const Signature* signature = nullptr;
  c10::SmallVector<const Value*, 8> operands;  // null for a tensor that was not given
  c10::SmallVector<uint8_t, 8> wanted;         // by operand: whether its gradient is needed
  at::ArrayRef<Value> results;                 // all results, including hidden ones
  c10::SmallVector<uint8_t, 4> given;          // by result: whether its gradient is given

  Key key() const;
};

// A cache of formulas. A formula is traced once for each combination of sizes. Tracing takes as
// long as several tens of runs of the op. Without a formula, each call of autograd.grad needs a
// flush, which takes longer than tracing.
class FormulaTable {
 public:
  // Returns the cached formula, or traces it. Returns null if the op has no formula.
  const Formula* find(Scope& scope, const FormulaRequest& request);

 private:
  struct Entry {
    Key key;
    std::unique_ptr<const Formula> formula;
  };

  std::unordered_multimap<uint64_t, Entry> entries_;  // by hash of the key
};

// Records the ops that this thread calls while the object exists.
class FormulaTrace {
 public:
  FormulaTrace();
  ~FormulaTrace();
  FormulaTrace(const FormulaTrace&) = delete;
  FormulaTrace& operator=(const FormulaTrace&) = delete;

  // Runs one call and records it. Raises an error if the call cannot be part of a formula.
  void run(const OpInfo& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

  uint32_t add_input(const at::Tensor& tensor);
  void end_inputs() { formula_.num_inputs = formula_.num_tensors; }
  // Declares that `tensor`, a result of a recorded call, is equal to input number `input`. In the
  // formula, later calls then read the input instead of the tensor.
  void set_known(const at::Tensor& tensor, uint32_t input);
  // After this call, each composite op is recorded as one call. The ops that a composite op calls
  // may depend on the strides of gradients, which differ from node to node.
  void note_composites() { notes_composites_ = true; }
  // Returns the number of the tensor, or kNone if this trace does not know the tensor.
  uint32_t number_of(const at::Tensor& tensor) const;

  // Returns the formula. It contains only the steps that these gradients depend on. `gradients`:
  // for each operand, the number of its gradient, or kNone.
  Formula finish(std::vector<uint32_t> gradients);

 private:
  struct Known {
    at::Tensor tensor;
    uint32_t number;
  };

  bool fills_new(at::ArrayRef<c10::IValue> arguments);
  void note(Formula::Step& step, at::ArrayRef<c10::IValue> arguments) const;
  void note_results(const c10::IValue& result, bool in_place);
  void add(const at::Tensor& tensor, uint32_t number);

  Formula formula_;
  std::vector<uint32_t> stands_for_;  // by number: the number to read instead (set_known)
  // Autograd saves copies of tensor objects, so the trace also finds tensors by their memory. The
  // trace keeps the tensors alive, because an address must not be reused.
  std::unordered_map<const c10::TensorImpl*, uint32_t> by_object_;
  std::unordered_map<const c10::StorageImpl*, std::vector<Known>> by_memory_;
  bool notes_composites_ = false;
};

}  // namespace autobatch

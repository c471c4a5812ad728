// The gradient of a captured op as a list of ops. Autograd's own formula is used: the op runs once
// on tensors of ones, autograd's engine differentiates it, and each op that the engine calls is
// noted (FormulaTrace). What was noted is then called for other nodes of the signature with their
// tensors, and is captured like any other call (captured_gradient.h).
//
// What depends on values has no formula: an op that reads its data, or draws random numbers.
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

// A list of calls. Tensors are numbered: the node's operands, its results, the gradients of its
// results, and then what the steps return.
struct Formula {
  struct Input {
    uint32_t argument = 0;
    uint32_t element = kNone;  // kNone unless in a list
    uint32_t number = 0;
  };
  struct Step {
    const OpInfo* op = nullptr;
    std::vector<c10::IValue> arguments;  // tensors are left out
    std::vector<Input> tensors;
    uint32_t first = 0;  // number of its first result
    uint32_t count = 0;
  };

  uint32_t num_inputs = 0;
  uint32_t num_tensors = 0;
  std::vector<Step> steps;
  std::vector<uint32_t> gradients;  // by operand; kNone: there is none
  std::vector<uint8_t> reads;       // by number of an input: whether a step reads it

  // Calls the steps. `inputs` may lack what is not read. An operand's gradient may be undefined.
  std::vector<at::Tensor> apply(at::ArrayRef<at::Tensor> inputs) const;
};

// What a formula follows from.
struct FormulaRequest {
  const Signature* signature = nullptr;
  c10::SmallVector<const Value*, 8> operands;  // null: an optional tensor that was not given
  c10::SmallVector<uint8_t, 8> wanted;         // by operand: whether its gradient is asked for
  at::ArrayRef<Value> results;                 // hidden ones too
  c10::SmallVector<uint8_t, 4> given;          // by result: whether there is a gradient of it

  Key key() const;
};

// The formulas that are known. Finding one takes as long as running the op some tens of times, for
// each combination of sizes; doing without costs a flush, which takes longer.
class FormulaTable {
 public:
  // Null if there is none.
  const Formula* find(Scope& scope, const FormulaRequest& request);

 private:
  struct Entry {
    Key key;
    std::unique_ptr<const Formula> formula;
  };

  std::unordered_multimap<uint64_t, Entry> entries_;  // by hash
};

// Notes the ops that are called on this thread while it lives.
class FormulaTrace {
 public:
  FormulaTrace();
  ~FormulaTrace();
  FormulaTrace(const FormulaTrace&) = delete;
  FormulaTrace& operator=(const FormulaTrace&) = delete;

  // Runs one call, and notes it. Raises if it can't be noted.
  void run(const OpInfo& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

  uint32_t add_input(const at::Tensor& tensor);
  void end_inputs() { formula_.num_inputs = formula_.num_tensors; }
  // From now on the tensor is what the input stands for, and was not computed.
  void set_known(const at::Tensor& tensor, uint32_t input);
  // From now on composite ops are noted as a whole. What they do inside may depend on the strides
  // of gradients, which differ from node to node.
  void note_composites() { notes_composites_ = true; }
  // kNone: not a tensor of this trace.
  uint32_t number_of(const at::Tensor& tensor) const;

  // What is needed for these, by operand.
  Formula finish(std::vector<uint32_t> gradients);

 private:
  struct Known {
    at::Tensor tensor;
    uint32_t number;
  };

  void note(Formula::Step& step, at::ArrayRef<c10::IValue> arguments) const;
  void note_results(const c10::IValue& result, bool in_place);
  void add(const at::Tensor& tensor, uint32_t number);

  Formula formula_;
  std::vector<uint32_t> stands_for_;  // by number
  // Autograd saves copies of tensor objects, so memory counts as well. Tensors are kept: an address
  // must not be reused.
  std::unordered_map<const c10::TensorImpl*, uint32_t> by_object_;
  std::unordered_map<const c10::StorageImpl*, std::vector<Known>> by_memory_;
  bool notes_composites_ = false;
};

}  // namespace autobatch

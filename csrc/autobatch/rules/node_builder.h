// The object that a rule fills while it captures a call. The object contains the node's operands,
// the key of the signature, and the results.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"

#include <c10/util/SmallVector.h>

namespace autobatch {

// Describes a node during capture. The rule reads the op's arguments and adds operands, words of
// the signature's key, and results.
class NodeBuilder {
 public:
  NodeBuilder(const OpInfo& op, Graph& graph, at::ArrayRef<c10::IValue> arguments,
              const DispatchContext& context);

  const OpInfo& op() const { return op_; }
  Graph& graph() { return graph_; }
  const DispatchContext& context() const { return context_; }

  // --- the arguments ---
  size_t num_arguments() const { return arguments_.size(); }
  const c10::IValue& argument(size_t i) const { return arguments_[i]; }
  at::ArrayRef<c10::IValue> arguments() const { return arguments_; }
  bool is_tensor(size_t i) const {
    return arguments_[i].isTensor() && arguments_[i].toTensor().defined();
  }
  const at::Tensor& tensor(size_t i) const { return arguments_[i].toTensor(); }
  // Whether argument i is the result of a captured op, or a view of such a result.
  bool is_computed(size_t i) const { return is_computed(tensor(i)); }
  bool is_computed(const at::Tensor& tensor) const;

  // --- operands, in the order in which the rule will read them ---
  // Adds argument i, a tensor of this instance, and returns its value. The device becomes part of
  // the key, but shape and dtype do not.
  Value operand(size_t i);
  // Argument i is a list of tensors. Adds its tensor at index `element`.
  Value operand(size_t i, size_t element);
  // Adds argument i, a tensor that all members of a batch share. The identity of the tensor becomes
  // part of the key.
  Value weight(size_t i);
  Value weight(size_t i, size_t element);
  // Adds a placeholder for an optional tensor that was not given.
  void absent(size_t i, size_t element = kNone);
  // Adds argument i as a constant. The argument is a Python number that PyTorch has wrapped in a
  // tensor. The value of the number becomes part of the key.
  void python_number(size_t i);
  // Adds all tensors of argument i, which is a list. The length of the list does not become part of
  // the key. The op must not have other operands.
  void variadic(size_t i);

  // --- the key ---
  void key(uint64_t word) { key_.push_back(word); }
  void truncate_key(size_t length) { key_.resize(length); }
  void key(const Geometry* geometry) { key_.push_back(reinterpret_cast<uint64_t>(geometry)); }
  // Appends the content of argument i to the key. Returns false if the content cannot be compared.
  bool constant(size_t i) { return append_constant(key_, arguments_[i]); }

  // --- results ---
  // Adds one result of the op. The result requires grad if an operand does, grad mode is on, and
  // `dtype` is differentiable.
  void result(const Geometry* geometry, c10::ScalarType dtype);
  void result(at::IntArrayRef sizes, c10::ScalarType dtype);
  // Adds a result that is kept for backward and not returned to the user.
  void hidden(at::IntArrayRef sizes, c10::ScalarType dtype);

  // Declares that eager must run the call, for example because the arguments are invalid and no
  // Meta kernel detects the error. The call then runs immediately and is not captured.
  void leave_to_eager() { deferrable_ = false, left_to_eager_ = true; }
  bool left_to_eager() const { return left_to_eager_; }
  // Sets the device of the results of an op without operands.
  void on_device(c10::Device device) { device_ = device, device_known_ = true; }
  // Declares that the op returns argument i itself. In this case, no node is added.
  void return_argument(size_t i) { returned_ = static_cast<uint32_t>(i); }
  uint32_t returned_argument() const { return returned_; }

  bool any_requires_grad() const { return any_requires_grad_; }
  // Makes the results require grad even if no operand requires grad.
  void require_grad() { any_requires_grad_ = true; }
  const Key& key() const { return key_; }
  const c10::SmallVector<ValueId, 8>& operands() const { return operands_; }
  const Value& operand_value(size_t slot) const { return graph_.value(operands_[slot]); }
  const c10::SmallVector<Slot, 8>& slots() const { return slots_; }
  uint32_t variadic_argument() const { return variadic_; }
  uint64_t weight_slots() const { return weight_slots_; }  // Signature::weight_slots
  // By operand: the position of its argument, or {kNone, kNone} if the operand was not given.
  const c10::SmallVector<Slot, 8>& sources() const { return sources_; }
  // Whether the call may be cached. If so, all calls with an equal CallKey (call_cache.h) have the
  // same key.
  bool is_cacheable() const { return cacheable_; }
  // Excludes the call from the call cache, because the node's key depends on more than the CallKey.
  void do_not_cache() { cacheable_ = false; }
  bool is_constant(size_t i) const { return i < 64 && (constants_ >> i & 1) != 0; }
  const c10::SmallVector<ResultMeta, 4>& results() const { return results_; }
  size_t num_visible() const { return num_visible_; }
  // The device of the operands. The device of a CPU scalar is used only if there are no other
  // operands.
  c10::Device device() const { return device_; }
  // Whether the call can be captured. All operands except CPU scalars must be on one device, every
  // operand must have a supported layout, and slabs must support the dtypes of all visible results.
  bool deferrable() const { return deferrable_; }

 private:
  Value add_operand(ValueId id, Slot slot);
  Value add_weight(const at::Tensor& tensor, Slot slot);
  void add_identity(const Value& value);

  const OpInfo& op_;
  Graph& graph_;
  at::ArrayRef<c10::IValue> arguments_;
  const DispatchContext& context_;
  Key key_;
  c10::SmallVector<ValueId, 8> operands_;
  c10::SmallVector<Slot, 8> slots_;
  c10::SmallVector<Slot, 8> sources_;
  bool cacheable_ = true;
  c10::SmallVector<ResultMeta, 4> results_;
  uint32_t variadic_ = kNone;
  uint64_t weight_slots_ = 0;
  uint32_t returned_ = kNone;
  uint64_t constants_ = 0;  // bit i: whether argument i is a tensor that is a constant
  size_t num_visible_ = 0;
  bool any_requires_grad_ = false;
  bool device_known_ = false;
  bool deferrable_ = true;
  bool left_to_eager_ = false;
  c10::Device device_ = c10::kCPU;
};

// Whether a slab can hold tensors of this dtype and, if the tensors require grad, a buffer can hold
// their gradients.
bool fits_slab(c10::ScalarType type, bool requires_grad);

}  // namespace autobatch

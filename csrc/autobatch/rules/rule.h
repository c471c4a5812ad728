// What an op rule is. A rule says, side by side, what of an op's arguments stands in its
// signature and what its results look like (capture), how a batch of nodes runs (forward), and
// how gradients flow back (backward). Rules are registered in tables, one line an op, in
// rules/<family>.cpp.
#pragma once

#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"
#include "autobatch/kernels/pointwise_op.h"
#include "autobatch/rules/backward_batch.h"
#include "autobatch/rules/batch.h"

#include <optional>
#include <string_view>

namespace autobatch {

struct Subgraph;

// A node being captured: the rule reads the op's arguments and adds operands, key words and
// results.
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
  // Whether argument i is the result of a captured op (or a view of one).
  bool is_computed(size_t i) const { return is_computed(tensor(i)); }
  bool is_computed(const at::Tensor& tensor) const;

  // --- operands, in the order the rule will read them ---
  // Argument i, a tensor of this instance. Returns its value; says nothing in the key of its
  // shape.
  Value operand(size_t i);
  // The tensor at `element` of argument i, a list.
  Value operand(size_t i, size_t element);
  // Argument i, a tensor that all members of a batch share: its identity goes into the key.
  Value weight(size_t i);
  Value weight(size_t i, size_t element);
  // An optional tensor that was not given.
  void absent(size_t i, size_t element = kNone);
  // Argument i, a Python number that arrives as a tensor: a constant, by value.
  void number(size_t i);
  // All tensors of argument i, a list of any length that the signature leaves out; the op's only
  // operands.
  void variadic(size_t i);

  // --- the key ---
  void key(uint64_t word) { key_.push_back(word); }
  void truncate_key(size_t length) { key_.resize(length); }
  void key(const Geometry* geometry) { key_.push_back(reinterpret_cast<uint64_t>(geometry)); }
  // The argument's content; false if it has none that can be compared.
  bool constant(size_t i) { return append_constant(key_, arguments_[i]); }

  // --- results ---
  // One result of the op; it requires grad if an operand does and the context records.
  void result(const Geometry* geometry, c10::ScalarType dtype);
  void result(at::IntArrayRef sizes, c10::ScalarType dtype);
  // A result the user never sees: what backward needs kept.
  void hidden(at::IntArrayRef sizes, c10::ScalarType dtype);

  // The arguments are wrong in a way that no Meta kernel tells: eager raises the error, here.
  void leave_to_eager() { deferrable_ = false, left_to_eager_ = true; }
  bool left_to_eager() const { return left_to_eager_; }
  // An op without operands: where its results are.
  void on_device(c10::Device device) { device_ = device, device_known_ = true; }
  // The op returns argument i itself; no node is made.
  void return_argument(size_t i) { returned_ = static_cast<uint32_t>(i); }
  uint32_t returned_argument() const { return returned_; }

  bool any_requires_grad() const { return any_requires_grad_; }
  const Key& key() const { return key_; }
  const c10::SmallVector<ValueId, 8>& operands() const { return operands_; }
  const Value& operand_value(size_t slot) const { return graph_.value(operands_[slot]); }
  const c10::SmallVector<Slot, 8>& slots() const { return slots_; }
  uint32_t variadic_argument() const { return variadic_; }
  uint64_t weight_slots() const { return weight_slots_; }  // Signature::weight_slots
  // Where each operand comes from; {kNone, kNone} if it was not given.
  const c10::SmallVector<Slot, 8>& sources() const { return sources_; }
  // Whether calls whose arguments are of the same kind (call_cache.h) have the same key.
  bool is_memorable() const { return memorable_; }
  // They have not: something else than the arguments and the context counts as well.
  void do_not_remember() { memorable_ = false; }
  bool is_constant(size_t i) const { return i < 64 && (constants_ >> i & 1) != 0; }
  const c10::SmallVector<ResultMeta, 4>& results() const { return results_; }
  size_t num_visible() const { return num_visible_; }
  // Of the operands; CPU scalars give way to others.
  c10::Device device() const { return device_; }
  // All operands on one device (CPU scalars excepted), none of a layout that is left to eager, all
  // results of a type that a slab holds?
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
  bool memorable_ = true;
  c10::SmallVector<ResultMeta, 4> results_;
  uint32_t variadic_ = kNone;
  uint64_t weight_slots_ = 0;
  uint32_t returned_ = kNone;
  uint64_t constants_ = 0;  // bit i: argument i is a tensor kept as a constant
  size_t num_visible_ = 0;
  bool any_requires_grad_ = false;
  bool device_known_ = false;
  bool deferrable_ = true;
  bool left_to_eager_ = false;
  c10::Device device_ = c10::kCPU;
};

class Rule {
 public:
  virtual ~Rule() = default;

  // "native", "functorch" or "loop", for the report.
  virtual std::string_view kind() const { return "native"; }
  // Describes the call in `builder`; false if the rule does not cover it in this form (the generic
  // rule is tried next). Shapes are checked here as far as the results' shapes depend on them:
  // when in doubt decline, and eager's own check raises eager's own error.
  virtual bool capture(NodeBuilder& builder) const = 0;
  // Runs the batch and fills its outputs.
  virtual void forward(Batch& batch) const = 0;
  // Adds the gradients of the operands of the members that `batch` holds.
  virtual void backward(BackwardBatch& batch) const = 0;
  // The results of one node as eager computes them, from its operands (undefined where one was not
  // given): by default the op itself with the signature's arguments. `places` is where the results
  // will stand, hidden ones too: metadata only.
  virtual std::vector<at::Tensor> eager(const Signature& signature,
                                        at::ArrayRef<at::Tensor> operands,
                                        at::ArrayRef<at::Tensor> places) const;
  // The same, once more: `computed` are the results there were. A random op must not draw again.
  virtual std::vector<at::Tensor> replay(const Signature& signature,
                                         at::ArrayRef<at::Tensor> operands,
                                         at::ArrayRef<at::Tensor> computed) const;

  // Eager computes one result of the op from another one (lstm_cell: h' from c'). Where the user
  // holds `from`, the gradient of `result` has to pass through its autograd node on the way.
  struct ResultDependency {
    uint32_t result = kNone;
    uint32_t from = kNone;
  };
  virtual ResultDependency result_dependency() const { return {}; }
  // Adds what the gradient of `result` contributes to that of `from`; `backward` then leaves that
  // out (BackwardBatch::chained).
  virtual void backward_chain(BackwardBatch& batch) const { (void)batch; }
  // `result` by ops that eager's autograd sees, from the operands and `from`.
  virtual at::Tensor replay_chain(at::ArrayRef<at::Tensor> operands, const at::Tensor& from) const {
    (void)operands;
    return from;
  }

  // Whether the gradient of result `k` goes to operand `slot`: where results depend on different
  // operands (of a cell's subgraph), what is not reached must not be run.
  virtual bool depends(uint32_t k, size_t slot) const {
    (void)k, (void)slot;
    return true;
  }
  // As a step of an elementwise pass, where it can be one; its gradient is in
  // elementwise_fusion.cpp.
  virtual std::optional<PointwiseOp> pointwise(const Signature& signature) const {
    (void)signature;
    return {};
  }
  // Vectors that forward adds to columns of result 0, as a product does its bias, if it can leave
  // that to a pass that reads the result first (BatchRecord::leaves_addends).
  struct Addend {
    size_t slot = 0;
    int64_t first = 0, width = 0;  // columns
    int64_t row = 0;               // elements of a row of the result
  };
  virtual std::vector<Addend> addends(const Tape& tape, const Node& node) const {
    (void)tape, (void)node;
    return {};
  }
  // Of a cell's subgraph: what it consists of. Else null.
  virtual const Subgraph* subgraph() const { return nullptr; }

  // Matmul-like: ties between signatures are resolved in favour of the others.
  virtual bool heavy() const { return false; }
  // Whether each node of it runs alone.
  virtual bool batchable() const { return true; }
  // Whether eager keeps values for backward, so that a second backward is an error.
  virtual bool saves() const { return true; }
  // Whether backward reads the operand's value: writing to it in between is an error then, and it
  // is kept until then.
  virtual bool reads(size_t slot) const {
    (void)slot;
    return true;
  }
  // Whether backward reads the values of result `k`. What no backward reads is not kept for it; of
  // an op that saves nothing neither operands nor results are.
  virtual bool reads_result(uint32_t k) const {
    (void)k;
    return true;
  }
  // Whether it asks for the regions of its operands and their gradients one by one, and nothing
  // else: it need not have them gathered.
  virtual bool copies_regions() const { return false; }
  // Whether its kernels are called below autograd (nothing of theirs is recorded).
  virtual bool below_autograd() const { return true; }
  // Whether the result's metadata comes from the op's Meta kernel, once a signature.
  virtual bool infers() const { return false; }
  // Of a rule that infers: the geometry of a result of this call, where it was `inferred` for the
  // first call of the signature. Rules that leave lengths out of the key tell it here.
  virtual const Geometry* geometry_of(NodeBuilder& builder, const Geometry* inferred) const {
    (void)builder;
    return inferred;
  }
};

// Of `cat`.
const Rule& cat_rule();
// functorch's batching rules for one call over the whole batch; falls back to the loop.
const Rule& functorch_rule();
// One call a member.
const Rule& loop_rule();
// embedding(weight, ...) of a weight.
const Rule& embedding_rule();
// One of these two for an op without a native rule.
const Rule& generic_rule(const OpInfo& op, bool random);

// The tables, one a family.
struct RuleEntry {
  const char* op;
  const Rule* rule;
};
using RuleTable = std::vector<RuleEntry>;
RuleTable pointwise_rules();
RuleTable matmul_rules();
RuleTable product_rules();
RuleTable recurrent_rules();
RuleTable rnn_rules();
RuleTable reduce_rules();
RuleTable shape_rules();
RuleTable index_rules();
RuleTable scatter_rules();
RuleTable batch_norm_rules();
RuleTable loss_rules();
RuleTable random_rules();
RuleTable attention_rules();
RuleTable encoder_rules();
RuleTable conv_rules();
RuleTable pool_rules();
RuleTable memory_rules();
RuleTable segment_rules();
RuleTable row_rules();
RuleTable tail_rules();
RuleTable point_loss_rules();
RuleTable generic_rules();  // for ops that need another generic rule than they would get

// Helpers that several families use.

// Whether a slab holds tensors of this type, and a buffer their gradients.
bool fits_slab(c10::ScalarType type, bool requires_grad);

inline uint64_t dtype_word(const Value& value) { return static_cast<uint64_t>(value.dtype); }
// Row-major up to gaps: eager's kernels give a contiguous result for it.
inline bool row_major(const Value& value) { return value.geometry->canonical->contiguous; }
inline bool is_float(const Value& value) { return c10::isFloatingType(value.dtype); }

}  // namespace autobatch

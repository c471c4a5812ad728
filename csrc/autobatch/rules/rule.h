// The interface of op rules. A rule defines in one place what an op's signature contains and which
// metadata its results have (capture), how a batch of nodes runs (forward), and how gradients flow
// back (backward). The files rules/<family>.cpp register rules in tables, one line per op.
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

// Describes a node during capture: the rule reads the op's arguments and adds operands, words of
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

  // --- operands, in the order the rule will read them ---
  // Adds argument i, a tensor of this instance, and returns its value. The key gets its device, but
  // neither its shape nor its dtype.
  Value operand(size_t i);
  // Adds the tensor at index `element` of argument i, a list.
  Value operand(size_t i, size_t element);
  // Adds argument i, a tensor that all members of a batch share: its identity goes into the key.
  Value weight(size_t i);
  Value weight(size_t i, size_t element);
  // Adds the place of an optional tensor that was not given.
  void absent(size_t i, size_t element = kNone);
  // Adds argument i, a Python number that arrives as a tensor, as a constant: its value goes into
  // the key.
  void number(size_t i);
  // Adds all tensors of argument i, a list whose length the key leaves out. The op must have no
  // other operands.
  void variadic(size_t i);

  // --- the key ---
  void key(uint64_t word) { key_.push_back(word); }
  void truncate_key(size_t length) { key_.resize(length); }
  void key(const Geometry* geometry) { key_.push_back(reinterpret_cast<uint64_t>(geometry)); }
  // Appends the content of argument i. Returns false if the content cannot be compared.
  bool constant(size_t i) { return append_constant(key_, arguments_[i]); }

  // --- results ---
  // Adds one result of the op. It requires grad if an operand does, grad mode is on and its dtype
  // is differentiable.
  void result(const Geometry* geometry, c10::ScalarType dtype);
  void result(at::IntArrayRef sizes, c10::ScalarType dtype);
  // Adds a result that is kept for backward and not returned to the user.
  void hidden(at::IntArrayRef sizes, c10::ScalarType dtype);

  // Declares the arguments invalid in a way that no Meta kernel detects. No rule captures the call
  // then: it runs at once, so that eager raises its own error.
  void leave_to_eager() { deferrable_ = false, left_to_eager_ = true; }
  bool left_to_eager() const { return left_to_eager_; }
  // Sets the device of the results of an op without operands.
  void on_device(c10::Device device) { device_ = device, device_known_ = true; }
  // Declares that the op returns argument i itself: no node is added.
  void return_argument(size_t i) { returned_ = static_cast<uint32_t>(i); }
  uint32_t returned_argument() const { return returned_; }

  bool any_requires_grad() const { return any_requires_grad_; }
  const Key& key() const { return key_; }
  const c10::SmallVector<ValueId, 8>& operands() const { return operands_; }
  const Value& operand_value(size_t slot) const { return graph_.value(operands_[slot]); }
  const c10::SmallVector<Slot, 8>& slots() const { return slots_; }
  uint32_t variadic_argument() const { return variadic_; }
  uint64_t weight_slots() const { return weight_slots_; }  // Signature::weight_slots
  // By operand: the argument that it comes from; {kNone, kNone} if it was not given.
  const c10::SmallVector<Slot, 8>& sources() const { return sources_; }
  // Whether the call may be cached: calls with equal CallKeys (call_cache.h) have the same key.
  bool is_memorable() const { return memorable_; }
  // Keeps the call out of the call cache, because its key depends on more than the CallKey.
  void do_not_remember() { memorable_ = false; }
  bool is_constant(size_t i) const { return i < 64 && (constants_ >> i & 1) != 0; }
  const c10::SmallVector<ResultMeta, 4>& results() const { return results_; }
  size_t num_visible() const { return num_visible_; }
  // The device of the operands. A CPU scalar counts only if there are no other operands.
  c10::Device device() const { return device_; }
  // Whether all operands are on one device (CPU scalars excepted), no operand has a layout that is
  // left to eager, and slabs support the dtypes of all visible results.
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

  // The name in the report: "native", "functorch" or "loop".
  virtual std::string_view kind() const { return "native"; }
  // Describes the call in `builder`. Returns false if the rule does not cover this form of the
  // call: the op's next rule is tried then, and the generic rule last. A rule checks shapes as far
  // as the results' shapes depend on them. In doubt it returns false, so that eager's own check
  // raises eager's own error.
  virtual bool capture(NodeBuilder& builder) const = 0;
  // Runs the batch and writes its outputs.
  virtual void forward(Batch& batch) const = 0;
  // Adds the gradients of the operands, for the members that `batch` holds.
  virtual void backward(BackwardBatch& batch) const = 0;
  // Computes the results of one node as eager does. By default it calls the op with the signature's
  // arguments and `operands` (an undefined operand was not given). `places` are the tensors that
  // will hold the results, hidden ones included; only their metadata may be read.
  virtual std::vector<at::Tensor> eager(const Signature& signature,
                                        at::ArrayRef<at::Tensor> operands,
                                        at::ArrayRef<at::Tensor> places) const;
  // Computes the results again, by ops that autograd records. `computed` are the results of the
  // first run. A random op must not draw new random numbers.
  virtual std::vector<at::Tensor> replay(const Signature& signature,
                                         at::ArrayRef<at::Tensor> operands,
                                         at::ArrayRef<at::Tensor> computed) const;

  // Eager computes `result` of the op from its other result `from` (lstm_cell: h' from c'). If the
  // user holds `from`, the gradient of `result` must pass through the autograd node of `from`.
  struct ResultDependency {
    uint32_t result = kNone;
    uint32_t from = kNone;
  };
  virtual ResultDependency result_dependency() const { return {}; }
  // Adds the contribution of the gradient of `result` to the gradient of `from`. `backward` then
  // leaves this contribution out (BackwardBatch::chained).
  virtual void backward_chain(BackwardBatch& batch) const { (void)batch; }
  // Computes `result` from the operands and `from`, by ops that eager's autograd records.
  virtual at::Tensor replay_chain(at::ArrayRef<at::Tensor> operands, const at::Tensor& from) const {
    (void)operands;
    return from;
  }

  // Whether the gradient of result `k` goes to operand `slot`. The results of a cell's subgraph may
  // depend on different operands, and ops that no gradient reaches must not run in backward.
  virtual bool depends(uint32_t k, size_t slot) const {
    (void)k, (void)slot;
    return true;
  }
  // Returns the op as a step of an elementwise pass, or nothing if it cannot be such a step. Its
  // gradient is in elementwise_fusion.cpp.
  virtual std::optional<PointwiseOp> pointwise(const Signature& signature) const {
    (void)signature;
    return {};
  }
  // A vector, such as the bias of a matrix product, that forward adds to columns of result 0.
  struct Addend {
    size_t slot = 0;
    int64_t first = 0, width = 0;  // columns
    int64_t row = 0;               // number of elements in a row of the result
  };
  // Returns the vectors whose addition forward can leave to the elementwise pass that reads result
  // 0 first (BatchRecord::leaves_addends).
  virtual std::vector<Addend> addends(const Tape& tape, const Node& node) const {
    (void)tape, (void)node;
    return {};
  }
  // The subgraph, if this is the rule of a cell's subgraph; else null.
  virtual const Subgraph* subgraph() const { return nullptr; }

  // Whether a batch is as expensive as a matrix product. The schedule resolves ties between
  // signatures in favour of rules that are not heavy.
  virtual bool heavy() const { return false; }
  // Whether nodes of one signature may share a batch. If false, each node runs alone.
  virtual bool batchable() const { return true; }
  // Whether eager saves values for backward, so that a second backward is an error.
  virtual bool saves() const { return true; }
  // Whether backward reads the operand's value. The value is then kept until backward, and writing
  // to it before backward is an error.
  virtual bool reads(size_t slot) const {
    (void)slot;
    return true;
  }
  // Whether backward reads the values of result `k`. A value that no backward reads is not kept for
  // it. If saves() is false, neither operands nor results are kept.
  virtual bool reads_result(uint32_t k) const {
    (void)k;
    return true;
  }
  // Whether the rule accesses its operands and their gradients only as single regions, so that they
  // need not be gathered.
  virtual bool copies_regions() const { return false; }
  // Whether the rule's kernels are called below autograd, which then records nothing.
  virtual bool below_autograd() const { return true; }
  // Whether the metadata of the results is inferred by running the op on sample data
  // (shape_inference.h), once per signature.
  virtual bool infers() const { return false; }
  // For a rule that infers: returns the geometry of a result of this call, given the geometry
  // `inferred` for the first call of the signature. A rule that leaves lengths out of the key
  // overrides this. Null if the inferred geometry does not fit the call.
  virtual const Geometry* geometry_of(NodeBuilder& builder, const Geometry* inferred) const {
    (void)builder;
    return inferred;
  }
};

// The rule of `cat`.
const Rule& cat_rule();
// Runs a batch as one call under functorch's batching rules; falls back to the loop.
const Rule& functorch_rule();
// Runs a batch as one call per member.
const Rule& loop_rule();
// The rule of embedding(weight, ...) where `weight` is a weight (docs/glossary.md).
const Rule& embedding_rule();
// Returns the rule for an op without a native rule: loop_rule() for a random op, else a functorch
// rule.
const Rule& generic_rule(const OpInfo& op, bool random);

// The tables, one per family of ops.
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
RuleTable generic_rules();  // for ops that need another generic rule than generic_rule() returns

// Helpers that several families use.

// Whether a slab can hold tensors of this dtype and, if they require grad, a buffer their
// gradients.
bool fits_slab(c10::ScalarType type, bool requires_grad);

inline uint64_t dtype_word(const Value& value) { return static_cast<uint64_t>(value.dtype); }
// Whether the dimensions are in row-major order, perhaps with gaps: eager's kernels then return a
// contiguous result.
inline bool row_major(const Value& value) { return value.geometry->canonical->contiguous; }
inline bool is_float(const Value& value) { return c10::isFloatingType(value.dtype); }

}  // namespace autobatch

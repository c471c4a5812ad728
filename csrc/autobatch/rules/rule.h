// The interface of op rules. A rule implements an op in one place. `capture` defines the signature
// and the metadata of the results. `forward` runs a batch of nodes. `backward` computes the
// gradients of the operands. The files rules/<family>.cpp register rules in tables, one line per
// op.
#pragma once

#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"
#include "autobatch/kernels/elementwise_op.h"
#include "autobatch/rules/backward_batch.h"
#include "autobatch/rules/batch.h"
#include "autobatch/rules/node_builder.h"

#include <optional>
#include <string_view>

namespace autobatch {

struct Subgraph;

class Rule {
 public:
  virtual ~Rule() = default;

  // The name in the report: "native", "functorch" or "loop".
  virtual std::string_view report_name() const { return "native"; }
  // Describes the call in `builder`. Returns false if the rule does not cover this form of the
  // call. In this case the library tries the op's next rule, and finally the generic rule. A rule
  // checks only the shapes on which the results' shapes depend. If the call may be invalid, the
  // rule returns false. Eager then raises the error.
  virtual bool capture(NodeBuilder& builder) const = 0;
  // Runs the batch and writes its outputs.
  virtual void forward(Batch& batch) const = 0;
  // Adds the gradients of the operands, for the members that `batch` contains.
  virtual void backward(BackwardBatch& batch) const = 0;
  // Computes the results of one node as eager does. The default implementation calls the op with
  // the signature's arguments and `operands`. An operand that was not given is undefined. `places`
  // are the tensors that will hold the results, including hidden results. Only the metadata of
  // `places` may be read.
  virtual std::vector<at::Tensor> eager(const Signature& signature,
                                        at::ArrayRef<at::Tensor> operands,
                                        at::ArrayRef<at::Tensor> places) const;
  // Computes the results again, with ops that autograd records. `computed` contains the results of
  // the first run. A random op must not draw new random numbers.
  virtual std::vector<at::Tensor> replay(const Signature& signature,
                                         at::ArrayRef<at::Tensor> operands,
                                         at::ArrayRef<at::Tensor> computed) const;

  // Eager computes result number `result` of the op from result number `from`. For example,
  // lstm_cell computes h' from c'. If the user holds `from`, the gradient of `result` must pass
  // through the autograd node of `from`.
  struct ResultDependency {
    uint32_t result = kNone;
    uint32_t from = kNone;
  };
  virtual ResultDependency result_dependency() const { return {}; }
  // Adds the contribution of the gradient of `result` to the gradient of `from`. `backward` then
  // omits this contribution (BackwardBatch::chained).
  virtual void backward_chain(BackwardBatch& batch) const { (void)batch; }
  // Computes `result` from the operands and `from`, with the ops that autograd records in eager.
  virtual at::Tensor replay_chain(at::ArrayRef<at::Tensor> operands, const at::Tensor& from) const {
    (void)operands;
    return from;
  }

  // Whether result `k` depends on operand `slot`. If so, the gradient of the result reaches the
  // operand. The results of a cell's subgraph may depend on different operands. Ops that no
  // gradient reaches must not run in backward.
  virtual bool depends(uint32_t k, size_t slot) const {
    (void)k, (void)slot;
    return true;
  }
  // Returns the op as a step of an elementwise program, or nullopt if it cannot be such a step.
  virtual std::optional<ElementwiseOp> elementwise(const Signature& signature) const {
    (void)signature;
    return {};
  }
  // A vector, such as the bias of a matrix product, that forward adds to columns of result 0.
  struct Addend {
    size_t slot = 0;
    int64_t first = 0, width = 0;  // first column, number of columns
    int64_t row = 0;               // number of elements in a row of the result
  };
  // Returns the vectors that an elementwise program can add instead of forward. The program is the
  // one that reads result 0 first (BatchRecord::leaves_addends).
  virtual std::vector<Addend> addends(const Tape& tape, const Node& node) const {
    (void)tape, (void)node;
    return {};
  }
  // If this is the rule of a cell's subgraph, returns the subgraph. Otherwise returns null.
  virtual const Subgraph* subgraph() const { return nullptr; }

  // Whether a batch is as expensive as a matrix product. The schedule resolves ties between
  // signatures in favour of rules that are not heavy.
  virtual bool heavy() const { return false; }
  // Whether nodes of one signature may share a batch. If false, each node runs alone.
  virtual bool batchable() const { return true; }
  // Whether eager saves values for backward. If so, a second backward without retain_graph is an
  // error.
  virtual bool saves() const { return true; }
  // Whether backward reads the value of operand `slot`. If so, the value is kept until backward,
  // and a write to the value before backward is an error.
  virtual bool reads(size_t slot) const {
    (void)slot;
    return true;
  }
  // Whether backward reads the values of result `k`. A value is kept only if some backward reads
  // it. If saves() is false, no operands and no results are kept.
  virtual bool reads_result(uint32_t k) const {
    (void)k;
    return true;
  }
  // Whether a batch runs as one matrix product if operand `slot` is the same value in all members.
  virtual bool gains_if_shared(size_t slot) const {
    (void)slot;
    return false;
  }
  // Whether the rule accesses its operands and their gradients only region by region. If so, the
  // operands and gradients need not be gathered.
  virtual bool copies_regions() const { return false; }
  // Whether the rule calls its kernels below autograd. If so, autograd does not record the calls.
  virtual bool below_autograd() const { return true; }
  // Whether the metadata of the results is inferred by running the op on sample data
  // (shape_inference.h), once per signature.
  virtual bool infers() const { return false; }
  // For a rule that infers: returns the geometry of a result of this call, given the geometry
  // `inferred` for the first call of the signature. A rule whose key does not contain lengths
  // overrides this function. Returns null if the inferred geometry does not fit the call.
  virtual const Geometry* geometry_of(NodeBuilder& builder, const Geometry* inferred) const {
    (void)builder;
    return inferred;
  }
};

// The rule of `cat`.
const Rule& cat_rule();
// Runs a batch as one call under functorch's batching rules. If functorch cannot run the batch,
// loop_rule() runs it.
const Rule& functorch_rule();
// Runs a batch as one call per member.
const Rule& loop_rule();
// The rule of embedding(weight, ...) where `weight` is a weight (docs/glossary.md).
const Rule& embedding_rule();
// Returns the rule for an op without a native rule. This is loop_rule() for a random op, and a
// functorch rule for any other op.
const Rule& generic_rule(const OpInfo& op, bool random);

// The tables, one per family of ops.
struct RuleEntry {
  const char* op;
  const Rule* rule;
};
using RuleTable = std::vector<RuleEntry>;
RuleTable elementwise_rules();
RuleTable matmul_rules();
RuleTable product_rules();
RuleTable recurrent_rules();
RuleTable rnn_rules();
RuleTable reduce_rules();
RuleTable shape_rules();
RuleTable index_rules();
RuleTable scatter_rules();
RuleTable batch_norm_rules();
RuleTable group_norm_rules();
RuleTable glu_rules();
RuleTable ctc_rules();
RuleTable complex_rules();
RuleTable sparse_rules();
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
RuleTable triangle_rules();
RuleTable point_loss_rules();
RuleTable generic_exceptions();  // for ops that need a generic rule other than generic_rule()

// Helpers that several families use.

inline uint64_t dtype_word(const Value& value) { return static_cast<uint64_t>(value.dtype); }
// Whether the dimensions are in row-major order. There may be gaps in memory. For a row-major
// operand, eager's kernels return a contiguous result.
inline bool row_major(const Value& value) { return value.geometry->canonical->contiguous; }
inline bool is_float(const Value& value) { return c10::isFloatingType(value.dtype); }

}  // namespace autobatch

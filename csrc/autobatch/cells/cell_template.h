// A cell is a function whose calls are captured as a whole. The first call of a kind is traced: the
// function runs as usual, and the ops that it adds to the graph are stored as a template. A later
// call of the same kind does not run the function. Instead, the library adds the template's nodes,
// with the arguments of this call as operands. In Suarez and Zhu's Efficient Dynamic Batching and
// in Cavs (vertex functions), the function is the unit of batching. In this library the function is
// the unit of capture, and the nodes of a call are batched like all other nodes.
#pragma once

#include "autobatch/capture/record_call.h"
#include "autobatch/export.h"

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace autobatch {

class VaryingNumbers;

// The function of a cell. Contains the function's identity in keys, and facts that are known from
// calls in earlier blocks. This class is thread-safe.
class CellFunction {
 public:
  // `compiles`: if possible, the subgraphs run as compiled code (compiled_subgraph.h).
  AUTOBATCH_INTERNAL explicit CellFunction(bool compiles = false);
  CellFunction(const CellFunction&) = delete;
  CellFunction& operator=(const CellFunction&) = delete;

  uint64_t id() const { return id_; }  // the first word of the key of each call
  bool compiles() const { return compiles_; }
  // Returns a bit mask for calls with `inputs` tensors. Bit i is set if tensor i was the result of
  // a cell in at least one call.
  std::shared_ptr<std::atomic<uint64_t>> waits(size_t inputs);

  // Whether two calls of the function had the same ops on tensors of different sizes. Calls of
  // different sizes batch better op by op than as subgraphs.
  std::atomic<bool> is_ragged{false};

 private:
  uint64_t id_;
  bool compiles_;
  std::mutex mutex_;
  std::map<size_t, std::shared_ptr<std::atomic<uint64_t>>> waits_;
};

// The ops that a call adds to the graph. Tensors are numbered: first the inputs, then the results
// in the order of their ops. Numbers >= kFirstWeight belong to weights. A weight is any tensor that
// is neither an input nor a result, such as a parameter or a constant.
class CellTemplate {
 public:
  // Adds the template's nodes to the graph, and appends the outputs of the call to `outputs`.
  // Returns false if a weight has changed since the trace. In this case the nodes that were already
  // added stay unused. `known`: the values of the inputs, as CellTable::make_key returns them; an
  // entry may be kNone.
  AUTOBATCH_INTERNAL bool apply(Scope& scope, at::ArrayRef<at::Tensor> inputs,
                                c10::SmallVectorImpl<at::Tensor>& outputs,
                                at::ArrayRef<ValueId> known = {}) const;

  size_t num_steps() const { return steps_.size(); }
  // Returns a description of the first difference from `other`, for an error message. Returns an
  // empty string if there is no difference.
  AUTOBATCH_INTERNAL std::string difference(const CellTemplate& other) const;
  // Returns the tensors that are neither inputs nor results.
  AUTOBATCH_INTERNAL std::vector<at::Tensor> weights() const;

  // Whether a call adds one node for all ops, or for nearly all ops (subgraph.h).
  bool has_subgraph() const { return compact_.has_value(); }
  // Removes the subgraph. Later calls add a node for each op, and these nodes can be batched with
  // other nodes.
  void drop_subgraph() { compact_.reset(); }
  // Whether `other` has the same ops on tensors of other sizes. The comparison includes hidden
  // results.
  bool differs_in_sizes(const CellTemplate& other) const;

  // Data of the host (host_hooks.h) that belongs to the template.
  std::shared_ptr<void> host;

 private:
  friend class CellTrace;

  static constexpr uint32_t kFirstWeight = uint32_t{1} << 31;

  struct Step {
    const OpInfo* op;
    CachedCall cached;
    bool grad_mode;                         // whether autograd was enabled
    c10::SmallVector<uint32_t, 4> tensors;  // the numbers of the op's tensors
    uint32_t first_result = 0;              // the number of the op's first result
    size_t num_results() const {
      return cached.signature != nullptr ? cached.visible : cached.views.size();
    }
  };
  struct Weight {
    at::Tensor tensor;
    uint64_t identity;
    bool is_weight;
    // A signature contains the identity of this tensor or of the base of its view.
    bool in_signatures = false;
    // The metadata that the tensor had when the call was traced.
    const Geometry* geometry = nullptr;
    bool requires_grad = false;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    at::Tensor base = {};  // base of `tensor`, if the traced call made `tensor` without autograd

    bool looks_the_same() const;
    // Whether `tensor` is a view of memory that its base no longer has, after `base.data = ...`.
    bool is_detached() const {
      return base.defined() && !base.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(
                                   tensor.unsafeGetTensorImpl()->unsafe_storage());
    }
  };

  // A node that replaces some of the steps, with the node's operands and results.
  struct Part {
    CachedCall cached;
    std::vector<uint32_t> operands, results;  // numbers of tensors
    // Bit i of `asks` is set if autograd needs the gradient edge of operand i. Bit i of `of_call`
    // is set if operand i is an input or a result, and not a weight.
    uint64_t asks = 0, of_call = 0;
    size_t ops = 0;
  };
  // The compact form of a call: one node, `main`, replaces the steps. Some matrix products do not
  // depend on the results of other cells. These products, and the steps that compute their
  // operands, run before `main`. So the products of all calls can form one batch. If possible, the
  // steps before `main` are one node, `front`; if not, each op is a node. Outputs that are views of
  // results or inputs are made after `main`.
  struct Compact {
    std::vector<uint32_t> before;  // steps that run before `main`; empty if there is a `front`
    std::optional<Part> front;     // one node that replaces the steps that run before `main`
    Part main;
    std::vector<uint32_t> views;                   // steps that make views after `main`
    std::shared_ptr<std::atomic<uint64_t>> waits;  // the mask of CellFunction::waits
  };
  friend class SubgraphBuilder;

  // Sets `compact_` if the steps can run as one node.
  void make_compact(Scope& scope, CellFunction& function, at::ArrayRef<at::Tensor> inputs);
  // Whether a number in a signature was found to vary after the trace, so that later calls must
  // pass it as a tensor.
  bool holds_varying_number(const VaryingNumbers& numbers) const;
  // Returns the values of the tensors. `numbers` identifies inputs, results and weights.
  static c10::SmallVector<ValueId, 16> values_of(at::ArrayRef<uint32_t> numbers,
                                                 at::ArrayRef<ValueId> weights,
                                                 at::ArrayRef<ValueId> ids) {
    c10::SmallVector<ValueId, 16> out;
    for (const uint32_t number : numbers) {
      out.push_back(number < kFirstWeight ? ids[number] : weights[number - kFirstWeight]);
    }
    return out;
  }
  bool apply_step(Scope& scope, const Step& step, at::ArrayRef<ValueId> weights,
                  c10::SmallVectorImpl<ValueId>& ids) const;
  void note_inputs(const Graph& graph, at::ArrayRef<ValueId> inputs) const;
  // Appends the values of the weights to `ids`. Returns false if a weight has changed since the
  // trace.
  bool find_weights(Graph& graph, c10::SmallVectorImpl<ValueId>& ids) const;
  // Adds the nodes of the compact form for the call that was traced. Afterwards the output tensors
  // of the traced call represent the results of the added nodes.
  void replace_traced(Scope& scope, at::ArrayRef<at::Tensor> traced);
  bool apply_steps(Scope& scope, at::ArrayRef<ValueId> weights,
                   c10::SmallVectorImpl<ValueId>& ids) const;
  void apply_part(Scope& scope, const Part& part, at::ArrayRef<ValueId> weights,
                  c10::SmallVectorImpl<ValueId>& ids) const;
  bool apply_subgraph(Scope& scope, at::ArrayRef<ValueId> weights,
                      c10::SmallVectorImpl<ValueId>& ids) const;

  std::vector<Step> steps_;
  std::optional<Compact> compact_;
  std::vector<Weight> weights_;
  // The values of the weights that find_weights() found last. These values are valid while
  // Graph::numbering() equals `known_numbering_`.
  mutable std::vector<ValueId> known_weights_;
  mutable uint64_t known_numbering_ = ~uint64_t{0};
  // The value of Graph::numbering() when the gradient edges of the weights were last recorded.
  mutable uint64_t asked_numbering_ = ~uint64_t{0};
  bool passes_numbers_ = false;           // CellTrace::passes_numbers()
  mutable uint64_t numbers_version_ = 0;  // VaryingNumbers::version() at the last check
  std::vector<uint8_t> input_is_weight_;
  std::vector<uint32_t> outputs_;
  size_t num_results_ = 0;
};

// Traces the capture of one call, from construction to finish(). A thread has at most one active
// trace.
class CellTrace {
 public:
  // `may_have_subgraph`: whether finish() may give the template a subgraph.
  AUTOBATCH_INTERNAL CellTrace(Scope& scope, at::ArrayRef<at::Tensor> inputs,
                               bool may_have_subgraph = true);
  AUTOBATCH_INTERNAL ~CellTrace();
  CellTrace(const CellTrace&) = delete;
  CellTrace& operator=(const CellTrace&) = delete;

  // Returns this thread's trace, or null.
  AUTOBATCH_INTERNAL static CellTrace* current();
  // If this thread has a trace, marks the trace as failed, so that no template is made from the
  // call. If a trace fails several times, only the first reason is kept.
  AUTOBATCH_INTERNAL static void break_off(const char* reason, const std::string& what);
  // Marks the trace as failed because the function has read a tensor's value. The rest of the call
  // may depend on the value.
  static void note_read(const std::string& what);

  // Whether numbers that vary are passed as tensors (graph/varying_numbers.h). In a subgraph,
  // numbers stay in the signatures.
  bool passes_numbers() const { return made_->passes_numbers_; }

  void add(const OpInfo& op, const CallKey& key, const CachedCall& cached,
           at::ArrayRef<at::Tensor> results);

  // Ends the trace and returns the template, or null with why() set. An output may be an input, a
  // result, or any other tensor that the traced ops have read. If `function` is not null, the
  // template may get a subgraph (CellTemplate::has_subgraph). The subgraph then also replaces the
  // ops of the traced call.
  AUTOBATCH_INTERNAL std::unique_ptr<CellTemplate> finish(at::ArrayRef<at::Tensor> outputs,
                                                          CellFunction* function = nullptr);
  const std::string& why() const { return why_; }
  // The line of user code where the trace failed.
  const std::string& site() const { return site_; }
  // Raises an error if the cell `name` has read a tensor's value, because cells must not read
  // values.
  AUTOBATCH_INTERNAL void check_no_read(const std::string& name) const;

 private:
  uint32_t number_of(c10::TensorImpl* tensor);
  void note_viewed_weights();

  Scope& scope_;
  CellTrace* outer_;
  std::unique_ptr<CellTemplate> made_ = std::make_unique<CellTemplate>();
  std::vector<at::Tensor> inputs_;
  // These references prevent a new tensor from getting an address that is in `numbers_`. The
  // references are weak, because PyTorch's factories copy a new tensor if it already has another
  // owner.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> results_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> numbers_;
  std::string why_, site_;
  bool has_read_ = false;
};

// Raises the error that reports a difference between a cell's trace and its template.
[[noreturn]] AUTOBATCH_INTERNAL void raise_different(const std::string& name,
                                                     const std::string& difference);

// The templates of one scope, indexed by key. A key identifies the function and describes the
// tensors of the call (CallKey). The key also tells which tensors are the same object, and contains
// the other arguments.
class CellTable {
 public:
  // Makes the key of a call. Returns false if a tensor cannot be captured. Stores the values of the
  // inputs in `known`, for CellTemplate::apply. The values are valid until the next capture or
  // flush.
  using Known = c10::SmallVector<ValueId, 8>;
  AUTOBATCH_INTERNAL static bool make_key(Scope& scope, uint64_t function,
                                          at::ArrayRef<at::Tensor> inputs,
                                          at::ArrayRef<uint64_t> others, Key& key,
                                          Known* known = nullptr);

  AUTOBATCH_INTERNAL CellTemplate* find(const Key& key);
  // Adds a template. If the new template shows that the function is ragged
  // (CellFunction::is_ragged), removes the subgraphs of all templates of the function.
  AUTOBATCH_INTERNAL void add(const Key& key, std::unique_ptr<CellTemplate> made,
                              CellFunction& function);
  AUTOBATCH_INTERNAL void remove(const Key& key);
  void clear() { recent_.fill(nullptr), entries_.clear(), of_function_.clear(); }
  // Whether the table is full. If the table is full, calls of new kinds run op by op.
  bool is_full() const { return entries_.size() >= kMostTemplates; }

 private:
  static constexpr size_t kMostTemplates = 4096;
  struct Entry {
    Key key;
    std::unique_ptr<CellTemplate> made;
  };
  using Entries = std::unordered_multimap<uint64_t, Entry>;  // by the hash of the key
  Entries::iterator locate(const Key& key);
  Entry*& recent(const Key& key) { return recent_[(key[0] >> 8) % recent_.size()]; }

  Entries entries_;
  std::array<Entry*, 8> recent_{};  // recently found entries, indexed by function id
  // For each function id: the templates that have a subgraph.
  std::unordered_map<uint64_t, std::vector<CellTemplate*>> of_function_;
};

}  // namespace autobatch

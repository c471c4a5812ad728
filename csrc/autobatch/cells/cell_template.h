// Cells: functions whose calls are captured as a whole. The first call of a kind is traced: the
// function runs as usual, and the ops that it adds to the graph are kept as a template. A later
// call of the same kind adds the template's nodes with its own arguments, without running the
// function. In Suarez and Zhu's Efficient Dynamic Batching and in Cavs (vertex functions), such a
// function is the unit of batching. Here it is the unit of capture, and its nodes are batched like
// any others.
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

// A function that is a cell: its identity in keys, and what its calls in earlier blocks have shown.
// Thread-safe.
class CellFunction {
 public:
  // `compiles`: compiled code runs the subgraphs where possible (compiled_subgraph.h).
  AUTOBATCH_INTERNAL explicit CellFunction(bool compiles = false);
  CellFunction(const CellFunction&) = delete;
  CellFunction& operator=(const CellFunction&) = delete;

  uint64_t id() const { return id_; }  // first word of the keys of its calls
  bool compiles() const { return compiles_; }
  // Returns the mask for calls with `inputs` tensors. Bit i is set once tensor i was the result of
  // a cell.
  std::shared_ptr<std::atomic<uint64_t>> waits(size_t inputs);

  // Whether the function has been called with the same ops on tensors of other sizes. Such calls
  // batch better op by op than as subgraphs.
  std::atomic<bool> is_ragged{false};

 private:
  uint64_t id_;
  bool compiles_;
  std::mutex mutex_;
  std::map<size_t, std::shared_ptr<std::atomic<uint64_t>>> waits_;
};

// The ops that a call adds to the graph. Tensors are numbered: first the inputs, then the results
// in the order of their ops. Numbers from kFirstWeight on are weights: all tensors that are neither
// inputs nor results, such as parameters and constants.
class CellTemplate {
 public:
  // Adds the nodes and appends the outputs. Returns false if a weight has changed since the trace;
  // nodes that were added until then are never read. `known`: values of the inputs from
  // CellTable::make_key, or kNone.
  AUTOBATCH_INTERNAL bool apply(Scope& scope, at::ArrayRef<at::Tensor> inputs,
                                c10::SmallVectorImpl<at::Tensor>& outputs,
                                at::ArrayRef<ValueId> known = {}) const;

  size_t num_steps() const { return steps_.size(); }
  // Describes the first difference from `other` for an error message. Empty if there is none.
  AUTOBATCH_INTERNAL std::string difference(const CellTemplate& other) const;
  // Returns the weights: tensors that are neither inputs nor results.
  AUTOBATCH_INTERNAL std::vector<at::Tensor> weights() const;

  // Whether a call adds one node for all ops, or for all but a few (subgraph.h).
  bool has_subgraph() const { return compact_.has_value(); }
  // Makes later calls add a node for each op, so that these nodes can join batches with other
  // nodes.
  void drop_subgraph() { compact_.reset(); }
  // Whether `other` has the same ops on tensors of other sizes.
  bool differs_in_sizes(const CellTemplate& other) const;

  // Data that the host keeps with the template.
  std::shared_ptr<void> host;

 private:
  friend class CellTrace;

  static constexpr uint32_t kFirstWeight = uint32_t{1} << 31;

  struct Step {
    const OpInfo* op;
    CachedCall cached;
    bool grad_mode;                         // whether autograd was enabled
    c10::SmallVector<uint32_t, 4> tensors;  // numbers of the op's tensors
    uint32_t first_result = 0;              // number of its first result
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
    // Metadata of the tensor when it was traced.
    const Geometry* geometry = nullptr;
    bool requires_grad = false;
    c10::ScalarType dtype = c10::ScalarType::Undefined;

    bool looks_the_same() const;
  };

  // Some of the steps as one node, with its operands and results.
  struct Part {
    CachedCall cached;
    std::vector<uint32_t> operands, results;  // tensor numbers
    // Bit i of `asks`: the gradient edge of operand i is needed. Bit i of `of_call`: operand i is
    // an input or a result, not a weight.
    uint64_t asks = 0, of_call = 0;
    size_t ops = 0;
  };
  // A call as one node, `main`. The products of inputs that do not depend on the results of other
  // cells run before `main`, together with the steps that they need. These steps are one node,
  // `front`, if possible; otherwise each op is a node. So the products of all calls form one batch.
  // The outputs that are views of results or inputs follow `main`.
  struct Compact {
    std::vector<uint32_t> before;  // steps that run before `main`, if there is no `front`
    std::optional<Part> front;     // in place of the steps `before`
    Part main;
    std::vector<uint32_t> views;                   // steps that make views after `main`
    std::shared_ptr<std::atomic<uint64_t>> waits;  // CellFunction::waits
  };
  friend class SubgraphBuilder;

  // Sets `compact_`, if the steps can run as one node.
  void make_compact(Scope& scope, CellFunction& function, at::ArrayRef<at::Tensor> inputs);
  bool apply_step(Scope& scope, const Step& step, at::ArrayRef<ValueId> weights,
                  c10::SmallVectorImpl<ValueId>& ids) const;
  void note_inputs(const Graph& graph, at::ArrayRef<ValueId> inputs) const;
  // Appends the values of the weights. Returns false if a weight has changed since the trace.
  bool find_weights(Graph& graph, c10::SmallVectorImpl<ValueId>& ids) const;
  // Adds the compact form's nodes for the call that was traced. The output tensors of this call
  // then represent the results of these nodes.
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
  // Values of the weights as found last, valid while Graph::numbering() is `known_numbering_`.
  mutable std::vector<ValueId> known_weights_;
  mutable uint64_t known_numbering_ = ~uint64_t{0};
  // Graph::numbering() for which the gradient edges of the weights have been taken.
  mutable uint64_t asked_numbering_ = ~uint64_t{0};
  std::vector<uint8_t> input_is_weight_;
  std::vector<uint32_t> outputs_;
  size_t num_results_ = 0;
};

// Traces the capture of one call, from construction to finish(). At most one trace of a thread is
// active.
class CellTrace {
 public:
  AUTOBATCH_INTERNAL CellTrace(Scope& scope, at::ArrayRef<at::Tensor> inputs);
  AUTOBATCH_INTERNAL ~CellTrace();
  CellTrace(const CellTrace&) = delete;
  CellTrace& operator=(const CellTrace&) = delete;

  // Returns this thread's trace, or null.
  AUTOBATCH_INTERNAL static CellTrace* current();
  // Marks this thread's trace, if there is one, as failed: the call cannot become a template. The
  // first reason is kept.
  AUTOBATCH_INTERNAL static void break_off(const char* reason, const std::string& what);
  // As break_off(), for a read of a tensor's value, on which the rest of the call may depend.
  static void note_read(const std::string& what);

  void add(const OpInfo& op, const CallKey& key, const CachedCall& cached,
           at::ArrayRef<at::Tensor> results);

  // Ends the trace and returns the template, or null with why() set. Outputs are inputs, results,
  // or other tensors that the trace has seen. With `function`, the template may get a subgraph
  // (CellTemplate::has_subgraph), which then also replaces the traced ops.
  AUTOBATCH_INTERNAL std::unique_ptr<CellTemplate> finish(at::ArrayRef<at::Tensor> outputs,
                                                          CellFunction* function = nullptr);
  const std::string& why() const { return why_; }
  // Line of user code where the trace failed.
  const std::string& site() const { return site_; }
  // Raises an error if the cell `name` has read a tensor's value, which cells must not do.
  AUTOBATCH_INTERNAL void check_no_read(const std::string& name) const;

 private:
  uint32_t number_of(c10::TensorImpl* tensor);
  void note_viewed_weights();

  Scope& scope_;
  CellTrace* outer_;
  std::unique_ptr<CellTemplate> made_ = std::make_unique<CellTemplate>();
  std::vector<at::Tensor> inputs_;
  // References that keep the addresses in `numbers_` from being reused. Weak, because a factory
  // returns a copy of a result that has other owners.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> results_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> numbers_;
  std::string why_, site_;
  bool has_read_ = false;
};

// Raises the error for a cell whose trace differs from its template.
[[noreturn]] AUTOBATCH_INTERNAL void raise_different(const std::string& name,
                                                     const std::string& difference);

// The templates of one scope, by key. The words of a key identify the function, describe its
// tensors (CallKey), say which of them are one object, and contain the other arguments.
class CellTable {
 public:
  // Makes the key of a call. Returns false if a tensor cannot be captured. `known` receives the
  // values of the inputs for CellTemplate::apply, which are valid until the next capture or flush.
  using Known = c10::SmallVector<ValueId, 8>;
  AUTOBATCH_INTERNAL static bool make_key(Scope& scope, uint64_t function,
                                          at::ArrayRef<at::Tensor> inputs,
                                          at::ArrayRef<uint64_t> others, Key& key,
                                          Known* known = nullptr);

  AUTOBATCH_INTERNAL CellTemplate* find(const Key& key);
  // Adds a template. If the new template shows that the function is ragged, the function's
  // templates lose their subgraphs.
  AUTOBATCH_INTERNAL void add(const Key& key, std::unique_ptr<CellTemplate> made,
                              CellFunction& function);
  AUTOBATCH_INTERNAL void remove(const Key& key);
  void clear() { recent_.fill(nullptr), entries_.clear(), of_function_.clear(); }
  // Whether the table is full; calls of further kinds then run op by op.
  bool is_full() const { return entries_.size() >= kMostTemplates; }

 private:
  static constexpr size_t kMostTemplates = 4096;
  struct Entry {
    Key key;
    std::unique_ptr<CellTemplate> made;
  };
  using Entries = std::unordered_multimap<uint64_t, Entry>;  // by hash
  Entries::iterator locate(const Key& key);
  Entry*& recent(const Key& key) { return recent_[(key[0] >> 8) % recent_.size()]; }

  Entries entries_;
  std::array<Entry*, 8> recent_{};  // last entries found, by function id modulo the size
  // Templates with subgraphs.
  std::unordered_map<uint64_t, std::vector<CellTemplate*>> of_function_;
};

}  // namespace autobatch

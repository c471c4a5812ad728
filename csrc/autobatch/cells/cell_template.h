// Cells: functions whose calls are captured as a whole. The first call of a kind is traced: it runs
// as ever, and what it adds to the graph is kept as a template. Another call of the same kind adds
// the template's nodes, with its own arguments, without running the function: in Suarez and Zhu's
// Efficient Dynamic Batching and in Cavs (vertex functions) this is the unit of batching; here it
// is that of capture, and the nodes are batched as any others.
#pragma once

#include "autobatch/capture/node_builder.h"
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

// A function that is a cell: what keys know it by, and what its uses in earlier blocks taught. Any
// thread may use it.
class CellFunction {
 public:
  // `compiles`: its subgraphs are run by compiled code (compiled_subgraph.h), where they can be.
  AUTOBATCH_INTERNAL explicit CellFunction(bool compiles = false);
  CellFunction(const CellFunction&) = delete;
  CellFunction& operator=(const CellFunction&) = delete;

  uint64_t id() const { return id_; }  // the first word of its calls' keys
  bool compiles() const { return compiles_; }
  // For calls with so many tensors: bit i if tensor i was a result of a cell.
  std::shared_ptr<std::atomic<uint64_t>> waits(size_t inputs);

  // It is called on tensors of many sizes: instances batch better op by op.
  std::atomic<bool> is_ragged{false};

 private:
  uint64_t id_;
  bool compiles_;
  std::mutex mutex_;
  std::map<size_t, std::shared_ptr<std::atomic<uint64_t>>> waits_;
};

// What a call adds to the graph. Tensors are numbered: the inputs, then results in order of their
// making, and from kFirstWeight on the tensors that are no inputs: weights, constants.
class CellTemplate {
 public:
  // Adds the nodes and makes the outputs. False if a weight is another one by now; what was added
  // is then dead. `known`: the inputs' values as the key found them, if it did.
  AUTOBATCH_INTERNAL bool apply(Scope& scope, at::ArrayRef<at::Tensor> inputs,
                                c10::SmallVectorImpl<at::Tensor>& outputs,
                                at::ArrayRef<ValueId> known = {}) const;

  size_t num_steps() const { return steps_.size(); }
  // What first differs between the two, for people; empty if nothing does.
  AUTOBATCH_INTERNAL std::string difference(const CellTemplate& other) const;
  // The tensors that are no inputs.
  AUTOBATCH_INTERNAL std::vector<at::Tensor> weights() const;

  // Whether a use is one node (subgraph.h), which runs as a whole.
  bool has_subgraph() const { return compact_.has_value(); }
  // From now on uses add a node for each op, so that they can join batches with others.
  void drop_subgraph() { compact_.reset(); }
  // Whether the other consists of the same ops, on tensors of other sizes.
  bool differs_in_sizes(const CellTemplate& other) const;

  // What whoever embeds the library keeps with it.
  std::shared_ptr<void> host;

 private:
  friend class CellTrace;

  static constexpr uint32_t kFirstWeight = uint32_t{1} << 31;

  struct Step {
    const OpInfo* op;
    CachedCall cached;
    bool records;                           // whether autograd was on
    c10::SmallVector<uint32_t, 4> tensors;  // numbers of the call's tensors
    uint32_t first_result = 0;              // number of its first result
    size_t num_results() const {
      return cached.signature != nullptr ? cached.visible : cached.views.size();
    }
  };
  struct Weight {
    at::Tensor tensor;
    uint64_t identity;
    bool is_weight;
    bool in_signatures = false;  // itself, or a view of it
    // What the signatures have of one that is not.
    const Geometry* geometry = nullptr;
    bool requires_grad = false;
    c10::ScalarType dtype = c10::ScalarType::Undefined;

    bool looks_the_same() const;
  };

  // Some of the steps as one node: what it is called with and what it gives.
  struct Part {
    CachedCall cached;
    std::vector<uint32_t> operands, results;  // numbers
    // Operands that are asked where their gradient goes, bit by bit; and which are no weights.
    uint64_t asks = 0, of_call = 0;
    size_t ops = 0;
  };
  // A use as one node. Before it comes, as a node too or as one for each op, what products of
  // inputs need that wait for no other cell: those of all uses are one batch. Behind it come the
  // views of results and inputs that are outputs.
  struct Compact {
    std::vector<uint32_t> before;  // steps
    std::optional<Part> front;     // in their place
    Part main;
    std::vector<uint32_t> views;                   // steps
    std::shared_ptr<std::atomic<uint64_t>> waits;  // CellFunction::waits
  };
  friend class SubgraphBuilder;

  // Sets the compact form, if there is one.
  void make_compact(Scope& scope, CellFunction& function, at::ArrayRef<at::Tensor> inputs);
  bool apply_step(Scope& scope, const Step& step, at::ArrayRef<ValueId> weights,
                  c10::SmallVectorImpl<ValueId>& ids) const;
  void note_inputs(const Graph& graph, at::ArrayRef<ValueId> inputs) const;
  // The values of the weights; false if one of them is another by now.
  bool find_weights(Graph& graph, c10::SmallVectorImpl<ValueId>& ids) const;
  // From now on the outputs of the traced call stand for those of a subgraph in its place.
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
  // The values that were found for them last, and in which numbering.
  mutable std::vector<ValueId> known_weights_;
  mutable uint64_t known_numbering_ = ~uint64_t{0};
  // In which numbering these have been asked where their gradients go.
  mutable uint64_t asked_numbering_ = ~uint64_t{0};
  std::vector<uint8_t> input_is_weight_;
  std::vector<uint32_t> outputs_;
  size_t num_results_ = 0;
};

// Watches the capture of one call, from construction to finish(). One at a time on a thread.
class CellTrace {
 public:
  AUTOBATCH_INTERNAL CellTrace(Scope& scope, at::ArrayRef<at::Tensor> inputs);
  AUTOBATCH_INTERNAL ~CellTrace();
  CellTrace(const CellTrace&) = delete;
  CellTrace& operator=(const CellTrace&) = delete;

  // This thread's, or null.
  AUTOBATCH_INTERNAL static CellTrace* current();
  // Of this thread's, if there is one: nothing can be made of it. The first reason counts.
  AUTOBATCH_INTERNAL static void break_off(const char* reason, const std::string& what);
  // The same where a value was read, on which the rest of the call may depend.
  static void note_read(const std::string& what);

  void add(const OpInfo& op, const CallKey& key, const CachedCall& cached,
           at::ArrayRef<at::Tensor> results);

  // The template, or null with why() set. Outputs are inputs, results, or other tensors that the
  // trace met. With `function`, uses may be one node (CellTemplate::has_body), this one at once.
  AUTOBATCH_INTERNAL std::unique_ptr<CellTemplate> finish(at::ArrayRef<at::Tensor> outputs,
                                                          CellFunction* function = nullptr);
  const std::string& why() const { return why_; }
  // The user's line where it broke off.
  const std::string& site() const { return site_; }
  // Raises an error if the cell `name` has read a value: its promise is broken.
  AUTOBATCH_INTERNAL void check_no_read(const std::string& name) const;

 private:
  uint32_t number_of(c10::TensorImpl* tensor);
  void note_viewed_weights();

  Scope& scope_;
  CellTrace* outer_;
  std::unique_ptr<CellTemplate> made_ = std::make_unique<CellTemplate>();
  std::vector<at::Tensor> inputs_;
  // No address is used twice meanwhile. Weak: of a tensor that others hold a factory gives a copy.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> results_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> numbers_;
  std::string why_, site_;
  bool has_read_ = false;
};

// Raises the error for a cell that does not do what its template does.
[[noreturn]] AUTOBATCH_INTERNAL void raise_different(const std::string& name,
                                                     const std::string& difference);

// Templates of one scope, by key. A key has words for what the function is, what its tensors are
// (CallKey) and which of them are one object, and the other arguments.
class CellTable {
 public:
  // The words for one call; null if a tensor is none that could be captured. `known`: what
  // CellTemplate::apply may be told, as long as nobody else captures or flushes.
  using Known = c10::SmallVector<ValueId, 8>;
  AUTOBATCH_INTERNAL static bool make_key(Scope& scope, uint64_t function,
                                          at::ArrayRef<at::Tensor> inputs,
                                          at::ArrayRef<uint64_t> others, Key& key,
                                          Known* known = nullptr);

  AUTOBATCH_INTERNAL CellTemplate* find(const Key& key);
  // Where the function turns out to be ragged, its templates lose their subgraphs.
  AUTOBATCH_INTERNAL void add(const Key& key, std::unique_ptr<CellTemplate> made,
                              CellFunction& function);
  AUTOBATCH_INTERNAL void remove(const Key& key);
  void clear() { recent_.fill(nullptr), entries_.clear(), of_function_.clear(); }
  // Further kinds of calls just run.
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
  std::array<Entry*, 8> recent_{};  // what was found last, by function
  std::unordered_map<uint64_t, std::vector<CellTemplate*>> of_function_;  // those with subgraphs
};

}  // namespace autobatch

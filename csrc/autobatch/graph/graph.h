// The deferred graph: nodes (captured ops), values (results, views, graph inputs) and interned
// geometries. Nodes and values are stored in arenas and addressed by index. The graph runs no ops.
#pragma once

#include "autobatch/common/pool.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace autobatch {

class PendingTensor;
struct FlushRecord;
struct Signature;
class SignatureTable;
class SliceCosts;

using NodeId = uint32_t;
using ValueId = uint32_t;
inline constexpr uint32_t kNone = 0xffffffffu;

// Sizes and strides (in elements) of a strided tensor. Geometries are interned: two values have the
// same geometry if and only if the pointers are equal. The GeometryTable owns its geometries.
struct Geometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t numel = 1;
  int64_t extent = 1;        // number of elements from the first to the last one; 0 if empty
  bool contiguous = true;    // row-major; strides of dimensions of size 1 are ignored
  bool overlapping = false;  // two indices refer to the same element (stride 0, unfold)
  // The row-major geometry with the same sizes if the dimensions are laid out in row-major order
  // (gaps allowed), or else this geometry itself. Eager's elementwise kernels return results with
  // the canonical geometry, so signatures depend on this geometry.
  const Geometry* canonical = nullptr;
  const Geometry* next = nullptr;  // next entry of the table with the same hash

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
};

class GeometryTable {
 public:
  const Geometry* intern(at::IntArrayRef sizes, at::IntArrayRef strides);
  const Geometry* intern_contiguous(at::IntArrayRef sizes);
  size_t size() const { return entries_.size(); }

 private:
  std::deque<Geometry> entries_;                         // a deque, so addresses stay valid
  ska::flat_hash_map<uint64_t, const Geometry*> index_;  // key: hash; value: head of a linked list
};

// How a view was made. The kind decides the effects of a write through the view. The order of the
// kinds matters: a view of a view has the larger of the two kinds.
enum class ViewKind : uint8_t {
  kPlain,
  kOneOfSeveral,  // from `split` or `unbind`: eager rejects a write that autograd records
  kNoGrad,        // made while grad mode was off
  kDetached,      // shares the memory but not the autograd history
  kData,          // like kDetached, but with a separate version counter: `x.data`
};

// A strided region of the result of an op or of a graph input. Pending tensors and operands refer
// to values.
struct Value {
  NodeId node = kNone;     // producer of the base; kNone if the base is a graph input
  uint32_t index = 0;      // output number of the producer, or index into Tape::graph_inputs
  ValueId base = kNone;    // value that owns the memory; the value itself unless it is a view
  ValueId parent = kNone;  // value that this view was made from (may be a view); kNone if no view
  ValueId next_view = kNone;  // next view of the same base; in a base: its latest view
  uint32_t uses = kNone;      // in a base: index into Tape::uses of the latest read of its memory
  const Geometry* geometry = nullptr;
  int64_t offset = 0;               // distance from the start of the base, in elements
  PendingTensor* tensor = nullptr;  // the user's tensor, while it is alive; not owned
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  bool requires_grad = false;
  ViewKind kind = ViewKind::kPlain;
  // Number of the `split` call that made the view, or 0. If it is not 0 and `kind` is kPlain,
  // autograd does not treat the results of the call as views (`unsafe_split`).
  uint16_t call = 0;

  bool is_graph_input() const { return node == kNone; }
  at::TensorOptions options() const { return at::TensorOptions().dtype(dtype).device(device); }
};

// Maps the elements of a view to elements of `of`, the viewed value. Elements of `of` share memory
// (`expand`), so an address does not identify an element. `geometry` and `offset` describe the view
// in a contiguous tensor with the sizes of `of`.
struct ElementMap {
  ValueId of = kNone;
  const Geometry* geometry = nullptr;
  int64_t offset = 0;
};
using ElementMaps = c10::SmallVector<ElementMap, 1>;

// State of a node (flush_progress.cpp).
enum class NodeState : uint8_t {
  kWaiting,
  kChosen,    // selected for the flush in progress; runs only if it is needed
  kNeeded,    // selected, and known to be needed
  kComputed,  // its results are stored in the open record's slabs
  kGone,      // unreachable, or moved to a closed record
};

// A read of a value by a node. The reads of a base and of its views form a list, latest first.
struct Use {
  NodeId reader = kNone;
  uint32_t next = kNone;
};
// Value::uses of a computed value whose memory was released.
inline constexpr uint32_t kReleased = kNone - 1;

// One captured op of one instance.
struct Node {
  Signature* signature = nullptr;
  uint32_t first_operand = 0;  // index into Tape::operands
  uint32_t num_operands = 0;
  ValueId first_value = 0;  // results are consecutive; hidden results (for backward) are last
  uint32_t num_values = 0;
  bool in_place = false;   // captured from an in-place op, which writes the result to operand 0
  bool spent = false;      // already differentiated without retain_graph (captured_gradient.h)
  bool is_shared = false;  // also represents equal nodes (common_subexpressions.h)
  NodeState state = NodeState::kWaiting;
  uint32_t number = kNone;  // temporary number in a plan, split or compaction (flush_graph.h)

  bool is_to_run() const { return state == NodeState::kChosen || state == NodeState::kNeeded; }
};

// A tensor that the graph reads but does not compute. The graph holds the tensor, because the
// address identifies the tensor, and a new tensor could reuse the address of a freed tensor.
struct GraphInput {
  at::Tensor tensor;  // the user's tensor; null once its history depends on the flush
  // The tensor that ops read: a detached alias, or a copy. A copy is made if the memory is foreign
  // (foreign_memory.h), or if elements share memory (except in indices and masks).
  at::Tensor data;
  bool is_copy = false;  // `data` does not share the memory of `tensor`
  bool is_odd = false;   // elements share memory without stride 0 (`unfold`); not captured
  at::Tensor as_read;    // content of `data` at capture, if it may change later (overwrites.h)
  // The geometry of `tensor` if `data` is a copy. The copy may have another geometry, but the
  // strides of results follow from the geometry of `tensor`.
  const Geometry* given = nullptr;
  // Version counter of `tensor`, and its value at capture. `counted` is false for a private copy
  // (no write reaches it) and for an inference tensor (it has no counter).
  c10::VariableVersion counter;
  uint32_t version = 0;
  bool counted = false;
  torch::autograd::Edge edge;  // receives the gradient; the flush moves the edge to autograd nodes
  const torch::autograd::Node* gradient_to = nullptr;  // edge.function, not owned; set by the flush
  bool is_weight = false;                              // signatures contain its identity
  uint64_t serial = 0;  // identity of the input; not reused while the graph has nodes
  ValueId value = kNone;
};

// A captured write. From this write on, the region of memory holds the value `source`.
struct Write {
  const Geometry* geometry = nullptr;
  int64_t offset = 0;
  ValueId source = kNone;
};

// The memory of a base that captured ops have written to. Values are immutable. After a write
// the memory holds another value, and the pending tensors on the memory stand for this value.
struct Memory {
  ValueId content = kNone;        // value of the whole memory, without `writes`
  std::vector<Write> writes;      // later writes to parts of the memory; no two overlap
  std::vector<ValueId> contents;  // all values that `content` has had
  std::unordered_map<ValueId, ValueId> views;  // maps views of the base to views of `content`
  uint64_t writer = 0;   // number of the fiber that made the last write; 0 outside of maps
  ValueId written = 0;   // values from this id on were added after the last write
  uint32_t version = 0;  // number of writes
  bool requires_grad = false;

  // Detached values, and views made under no_grad() after the last write, have no history.
  bool has_history(ValueId id, const Value& value) const {
    return value.kind < ViewKind::kNoGrad || (value.kind == ViewKind::kNoGrad && id < written);
  }
};

// The arenas of a graph. A flush moves the arenas into the record that backward reads.
struct Tape {
  PooledVector<Node> nodes;
  PooledVector<Value> values;
  PooledVector<ValueId> operands;  // kNone: omitted optional tensor
  PooledVector<Use> uses;          // by index into `operands`; filled at reads (flush_progress.cpp)
  std::vector<GraphInput> graph_inputs;
  // Maps the content of a written memory to the number of nodes at its last write. If an earlier
  // node read the old content and eager saves this operand, the node's backward raises an error.
  std::unordered_map<ValueId, NodeId> written_at;
  // Maps the last content of a written memory to the version of the tensors on this memory.
  std::unordered_map<ValueId, uint32_t> versions;
  std::unordered_map<ValueId, ElementMaps> element_maps;              // key: a view
  std::unordered_map<ValueId, c10::SmallVector<ValueId, 2>> sharers;  // key: base (shared_memory.h)

  const ElementMap* find_element_map(ValueId id, ValueId of) const;
  // `id` must have elements that share memory. Returns the outermost value in which all elements of
  // `id` are distinct elements (ElementMap), or `id` if there is no such value. Elements of the
  // returned value identify the elements of `id`.
  ValueId counted_in(ValueId id) const;
  // Whether it is known which elements of `of` the view contains. Elements of `of` share memory.
  bool knows_elements(ValueId view, ValueId of) const {
    return find_element_map(view, counted_in(of)) != nullptr;
  }
  // Copies the ElementMaps of value `id` in `from` to value `to` of this tape. `number` maps a
  // value of `from` to this tape. An entry whose value is mapped to kNone is dropped.
  template <class Number>
  void take_element_maps(ValueId to, const Tape& from, ValueId id, const Number& number) {
    const auto known = from.element_maps.find(id);
    if (known == from.element_maps.end()) return;
    ElementMaps& here = element_maps[to];
    for (ElementMap map : known->second) {
      map.of = number(map.of);
      if (map.of != kNone) here.push_back(map);
    }
  }
  // Whether a pending tensor stands for the value, a view of it, or a value that shares its memory.
  bool is_looked_at(ValueId base) const;
  // Whether a waiting node reads the value or a view of it. Nodes that were captured after the last
  // read (flush_progress.cpp) do not count.
  bool is_read(ValueId base);
  at::ArrayRef<ValueId> operands_of(const Node& node) const {
    return {operands.data() + node.first_operand, node.num_operands};
  }
  bool needs_grad(const Node& node) const {
    const auto first = values.begin() + node.first_value;
    return std::any_of(first, first + node.num_values,
                       [](const Value& value) { return value.requires_grad; });
  }
};

// A separately flushed part of a graph, and its values that the other nodes of the graph need.
struct Split {
  struct Export {
    ValueId value = kNone;     // the exported value, in `tape`
    uint32_t graph_input = 0;  // index of the graph input that replaces the value in the graph
  };
  Tape tape;
  std::vector<Export> exports;
  // If `is_renumbered` is true: former ids of the nodes and values of `tape`, in order.
  bool is_renumbered = false;
  std::vector<NodeId> nodes;
  std::vector<ValueId> values;
};

// Outcome of an export: its tensor, or the reason why the tensor is lost.
struct Computed {
  at::Tensor tensor;
  std::shared_ptr<const std::string> lost;
};

// The tape that capture writes to, with an index from tensors to graph inputs.
class Graph {
 public:
  explicit Graph(std::shared_ptr<GeometryTable> geometries);
  ~Graph();  // live pending tensors become lost
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  const Tape& tape() const { return tape_; }
  GeometryTable& geometries() { return *geometries_; }
  // Replaces the geometry table. The graph must be empty.
  void use(std::shared_ptr<GeometryTable> geometries) { geometries_ = std::move(geometries); }
  bool empty() const { return tape_.nodes.empty(); }
  const Value& value(ValueId id) const { return tape_.values[id]; }

  // Returns the value that the argument stands for. An ordinary tensor stands for a graph input.
  // The graph input is added if the tensor is new or has changed.
  ValueId value_of(const at::Tensor& tensor, bool weight = false);
  // Returns a number that is unique across graphs and changes when values are renumbered.
  uint64_t numbering() const { return numbering_; }
  // Whether `tensor` is unchanged since its graph input `id` (in this numbering) was added.
  bool still_is(ValueId id, const at::Tensor& tensor) const;
  // Returns the graph input of `tensor`, or kNone if it does not exist or the tensor has changed.
  ValueId find_graph_input(const at::Tensor& tensor) const;
  ValueId find_graph_input(const at::Tensor& tensor, bool requires_grad) const;
  // Fills in the metadata of the value that `tensor` would get as a graph input. Returns false if
  // the graph input would be a copy, or if the tensor is stale.
  bool describe_graph_input(const at::Tensor& tensor, Value& value) const;
  // Like value_of, but returns one value for all tensors with the same memory, because each `W.t()`
  // makes a new object. In grad mode, tensors that require grad get separate values.
  ValueId weight_value_of(const at::Tensor& tensor);

  // Gets the gradient edge of the value's graph input, if any. Must be called when an op that
  // autograd records reads the value, because gradient_edge() may fail later, at the flush.
  void need_gradient(ValueId id);

  ValueId add_view(ValueId parent, const Geometry* geometry, int64_t offset, bool requires_grad,
                   ViewKind kind = ViewKind::kPlain);
  void set_element_maps(ValueId view, ElementMaps element_maps) {
    tape_.element_maps.emplace(view, std::move(element_maps));
  }
  // Marks the views as results of one autograd node (`split`).
  void note_siblings(at::ArrayRef<ValueId> views);
  NodeId add_node(Signature* signature, at::ArrayRef<ValueId> operands);
  ValueId add_result(NodeId node, const Geometry* geometry, c10::ScalarType dtype,
                     c10::Device device, bool requires_grad);

  void attach(ValueId id, PendingTensor* tensor);
  // Removes the pending tensor of the value: the tensor was destroyed or is no longer pending.
  void detach(ValueId id) {
    (lent_to_ != nullptr ? *lent_to_ : tape_).values[id].tensor = nullptr;
    if (progress_ != nullptr) died_.push_back(id);
  }
  // Records that the tensor was destroyed on a thread other than its graph's thread (Python's
  // garbage collector may run on any thread). Later, settle_orphans detaches the tensor.
  static void note_orphan(PendingTensor& tensor);

  // --- memory that was written to (deferred_writes.h) ---

  // Returns null if nothing was written to the base.
  Memory* memory_of(ValueId base);
  Memory& make_memory(ValueId base);
  bool has_writes() const { return !memories_.empty(); }
  std::unordered_map<ValueId, Memory>& memories() { return memories_; }
  // Must be called when all memories are settled: each tensor stands for its memory's content.
  void forget_memories() { memories_.clear(); }
  // Whether `id` is a pending result (or a view of one) with no gradient, no captured write and no
  // other live tensor on its memory. All operands of the result's op must be graph inputs.
  bool is_fresh(ValueId id) const;
  // Returns the value that the memory of `id` holds now. Returns `id` if nothing was written to it.
  // Writes to only a part of `id` must already be combined into one value (deferred_writes.h).
  ValueId current(ValueId id);
  // Returns current(id) if no write to a part of its memory is recorded, else kNone.
  ValueId settled(ValueId id) {
    if (memories_.empty() || raw_) return id;
    Memory* memory = memory_of(tape_.values[id].base);
    if (memory == nullptr) return id;
    return memory->writes.empty() ? view_of_content(*memory, id) : kNone;
  }
  bool is_written(ValueId id) const {
    return !memories_.empty() && memories_.count(tape_.values[id].base) != 0;
  }
  // Whether a read of `id` now gives a value that requires grad.
  bool requires_grad_now(ValueId id) const;
  // While a guard exists, each pending tensor stands for its own value, and writes are ignored.
  class RawGuard {
   public:
    explicit RawGuard(Graph& graph) : graph_(graph), before_(std::exchange(graph.raw_, true)) {}
    ~RawGuard() { graph_.raw_ = before_; }
    RawGuard(const RawGuard&) = delete;
    RawGuard& operator=(const RawGuard&) = delete;

   private:
    Graph& graph_;
    bool before_;
  };
  // Makes the tensor of `from` stand for `to`.
  void move_tensor(ValueId from, ValueId to);
  void note_written(const Memory& memory, NodeId when);
  void note_in_place(NodeId node) { tape_.nodes[node].in_place = true; }
  void note_spent(NodeId node) { tape_.nodes[node].spent = true; }
  void note_version(ValueId content, uint32_t version) { tape_.versions[content] = version; }

  // Whether a pending op, tensor or write reads memory of this tensor's storage.
  bool reads_storage_of(const at::Tensor& tensor) const;
  template <class Visit>
  void for_each_graph_input(const Visit& visit) {
    for (GraphInput& graph_input : tape_.graph_inputs) visit(graph_input);
  }

  // Whether captured ops must not read the storage because of a pending write
  // (memory_updates.h).
  bool is_stale(const at::Tensor& tensor) const;
  bool has_stale() const { return !stale_.empty(); }
  // Marks a storage as stale. Each call must be matched by one call of forget_stale().
  void note_stale(const c10::Storage& storage);
  void forget_stale(const c10::Storage& storage);

  // Returns the identity of the value's base, for signatures and call keys.
  uint64_t identity(const Value& value) const;
  // Like identity(), for a new input that requires grad, if `ahead` such inputs are added first.
  uint64_t identity_of_new(uint32_t ahead) const;

  // Detaches tensors destroyed on other threads. Must be called before the tensors are used.
  void settle_orphans();

  // Empties the graph and returns its tape. The caller must materialize the pending tensors of the
  // tape or mark them as lost.
  Tape take();

  // --- parts that are computed while other nodes wait (flush_progress.cpp) ---

  // Selects the nodes that the targets need. Also selects each node that has the signature of a
  // needed node and depends on no unselected node. (The node fits into a batch now, and would need
  // a separate batch later.) Without targets, selects all reachable nodes. Unreachable nodes become
  // kGone. The returned nodes are in capture order. The time is proportional to the number of
  // selected nodes plus the number of changes since the last read.
  std::vector<NodeId> choose(at::ArrayRef<ValueId> targets);
  // Selects at least `least` ready nodes (operands computed or selected), or all ready nodes if
  // there are fewer. Repeatedly selects all ready nodes of the signature with the most ready nodes.
  std::vector<NodeId> choose_ready(size_t least);
  // Selects nodes that run in about the time that `costs` allows. In each round every signature has
  // one turn. The signature with the most ready nodes is first. A turn selects the ready nodes of
  // the signature, the earliest first, until no time is left. A node that becomes ready normally
  // runs in the next round at the latest. If no time is left for a node, the node runs right after
  // the nodes that became ready earlier.
  std::vector<NodeId> choose_slice(SliceCosts& costs);
  // Returns the number of nodes that have not run.
  size_t num_waiting() const { return tape_.nodes.size() - num_finished_; }
  bool is_computed(NodeId id) const { return tape_.nodes[id].state == NodeState::kComputed; }
  // Whether a new node may read the result. If the result is computed, its memory is kept from now
  // on until review() finds that nothing refers to it.
  bool may_be_read(ValueId base);
  size_t num_computed() const { return num_computed_; }
  // Marks the nodes `ran` of `chosen` as computed: their results are stored in the open record's
  // slabs, where later nodes may read them. If `all` is true, no node failed, and nodes in `ran`
  // replace the other chosen nodes.
  void note_computed(at::ArrayRef<NodeId> chosen, at::ArrayRef<NodeId> ran, bool all);
  // Releases the memory of a computed result if no tensor and no waiting node refers to it.
  void review(ValueId base);
  // Record of the computed nodes that stay in the graph (incremental_flush.h), or null.
  const std::shared_ptr<FlushRecord>& open_record() const { return open_record_; }
  void set_open_record(std::shared_ptr<FlushRecord> record) { open_record_ = std::move(record); }
  // While a loan exists, the open record owns the tape. Only detach() may be called on the graph.
  class Loan {
   public:
    Loan(Graph& graph, Tape& to);
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    Graph& graph_;
  };
  bool is_lent() const { return lent_to_ != nullptr; }

  // Moves the computed nodes, and the nodes chosen for the targets, out of the graph. The other
  // nodes keep their ids. Written memory must have been settled (deferred_writes.h). The time is
  // proportional to the size of the moved part.
  Split split(at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> chosen,
              SignatureTable& signatures);
  // Moves all nodes and values out of the graph.
  Split split();
  // After the split part was computed, sets the graph inputs that replace the exports. Tensors that
  // depend on a lost export become lost.
  void fill_exports(const Split& split, at::ArrayRef<Computed> exports);
  // Renumbers the remaining nodes and values if most of the tape is no longer needed.
  void compact();

 private:
  friend class Splitter;
  friend class Compactor;
  struct Progress;
  // Returns the value of `id` in written memory: `content`, or a view of it (kept in `views`).
  ValueId view_of_content(Memory& memory, ValueId id);
  void bury_orphans();  // the caller must hold orphans_mutex()
  void lose_readers_of(const std::unordered_map<uint32_t, const Computed*>& graph_input);
  ValueId add_graph_input(const at::Tensor& tensor, bool weight);
  uint64_t new_serial(bool trained);
  bool is_awaited(ValueId graph_input) const;
  bool looks_at_others(at::ArrayRef<ValueId> targets) const;
  void forget_graph_input(const GraphInput& graph_input);
  void forget_progress();
  void see_changes();
  void see_new_nodes();
  void see_deaths();
  bool is_wanted(NodeId id);
  void forget_unless_wanted(NodeId id);
  void take_needed(at::ArrayRef<ValueId> targets, std::vector<NodeId>& chosen);
  void take_along(std::vector<NodeId>& chosen);
  void note_chosen(NodeId id, std::vector<NodeId>& chosen);
  const Signature* next_turn();
  void take_turn(const Signature* signature, SliceCosts& costs, std::vector<NodeId>& chosen);
  void drop_run(std::vector<NodeId>& ready, const Signature* signature);
  void note_ready(NodeId id, std::vector<NodeId>& chosen);
  void release_readers(NodeId id, std::vector<NodeId>& chosen);

  std::shared_ptr<GeometryTable> geometries_;
  Tape tape_;
  Tape* lent_to_ = nullptr;
  std::shared_ptr<FlushRecord> open_record_;
  std::unique_ptr<Progress> progress_;            // made at the first read
  std::vector<ValueId> died_;                     // values that were detached since the last read
  size_t num_computed_ = 0;                       // nodes in the open record
  size_t num_finished_ = 0;                       // nodes in state kComputed or kGone
  std::unordered_map<ValueId, Memory> memories_;  // key: a base
  bool raw_ = false;
  // Weak references to tensors destroyed on another thread, and the values they stood for.
  std::vector<std::pair<PendingTensor*, ValueId>> orphans_;
  uint32_t next_serial_ = 0;
  uint32_t next_trained_ = 0;  // number of the next graph input that requires grad
  uint64_t numbering_ = 0;
  uint16_t last_call_ = 0;
  uint64_t renumbered_ = 0;  // makes identities differ from those of earlier numberings
  ska::flat_hash_map<const c10::TensorImpl*, ValueId> graph_input_index_;
  std::unordered_multimap<const void*, ValueId> weight_index_;  // key: data pointer
  std::unordered_map<const c10::StorageImpl*, size_t> stale_;   // by storage: number of marks
};

}  // namespace autobatch

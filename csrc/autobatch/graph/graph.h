// The deferred graph: nodes (captured ops), values (their results, views of them, and graph
// inputs), and interned geometry. Plain arenas addressed by index; nothing here runs an op.
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
#include <unordered_set>
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

// Sizes and strides (in elements) of a strided tensor, interned: two values have the same
// geometry exactly if the pointers are equal. Lives as long as its GeometryTable.
struct Geometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t numel = 1;
  int64_t extent = 1;        // elements from the first to the last one inclusive; 0 if empty
  bool contiguous = true;    // row-major; strides of dimensions of size 1 do not count
  bool overlapping = false;  // some element is reached twice (stride 0, unfold)
  // The row-major geometry of the same sizes if the dimensions are laid out in row-major order
  // (perhaps with gaps), else this geometry itself. Eager's elementwise kernels give results of
  // this geometry, so it is what a signature has to know of an operand.
  const Geometry* canonical = nullptr;
  const Geometry* next = nullptr;  // in the table, of the same hash

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
};

class GeometryTable {
 public:
  const Geometry* intern(at::IntArrayRef sizes, at::IntArrayRef strides);
  const Geometry* intern_contiguous(at::IntArrayRef sizes);
  size_t size() const { return entries_.size(); }

 private:
  std::deque<Geometry> entries_;                         // addresses stay valid
  ska::flat_hash_map<uint64_t, const Geometry*> index_;  // by hash; the first of a chain
};

// How a view came about, where that matters to a write through it. A view of a view has the larger
// of the two.
enum class ViewKind : uint8_t {
  kPlain,
  kOneOfSeveral,  // of what `split` or `unbind` returned: eager refuses to write to it with grad
  kNoGrad,        // made while gradients were off
  kDetached,      // shares the memory and not the gradient
  kData,          // the same, and not the version counter either: `x.data`
};

// What a pending tensor, or an operand, refers to: a strided region of an op's result or of an
// graph input. `offset` counts elements from the start of the base.
struct Value {
  NodeId node = kNone;        // the base's producer; kNone: that is a graph input
  uint32_t index = 0;         // which output of the producer, or which graph input, it is
  ValueId base = kNone;       // the value that owns the memory; itself unless this is a view
  ValueId parent = kNone;     // what this is a view of (may itself be a view); kNone if no view
  ValueId next_view = kNone;  // over the same base; of the base: the latest of its views
  uint32_t uses = kNone;  // of a base: the latest read of it or of a view of it, into Tape::uses
  const Geometry* geometry = nullptr;
  int64_t offset = 0;
  PendingTensor* tensor = nullptr;  // the user's tensor, while anybody can reach it
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  bool requires_grad = false;
  ViewKind kind = ViewKind::kPlain;
  uint16_t call = 0;  // not 0 of what one `split` made: which; of no view to autograd: kPlain

  bool is_graph_input() const { return node == kNone; }
  at::TensorOptions options() const { return at::TensorOptions().dtype(dtype).device(device); }
};

// Where a view's elements stand among those of another value, which it is a view of and whose
// elements share memory (of `expand`): as if each of them had its own, one after the other.
// Addresses do not tell.
struct Apart {
  ValueId of = kNone;
  const Geometry* geometry = nullptr;
  int64_t offset = 0;
};
using Aparts = c10::SmallVector<Apart, 1>;

// What has become of a node (flush_progress.cpp).
enum class NodeState : uint8_t {
  kWaiting,
  kChosen,    // to be run by the flush under way, if something needs it
  kNeeded,    // which is so
  kComputed,  // its results lie in the open record's slabs
  kGone,      // nobody can reach it, or a closed record has it
};

// A read of a value: which node reads it, and the next one in the list of the value's base.
struct Use {
  NodeId reader = kNone;
  uint32_t next = kNone;
};
// In place of that list: the value's memory was let go.
inline constexpr uint32_t kReleased = kNone - 1;

// One captured op of one instance.
struct Node {
  Signature* signature = nullptr;
  uint32_t first_operand = 0;  // into Tape::operands
  uint32_t num_operands = 0;
  ValueId first_value = 0;  // results are consecutive; hidden ones (kept for backward) last
  uint32_t num_values = 0;
  bool in_place = false;  // its result was written to where operand 0 stood
  bool spent = false;     // differentiated without retain_graph (captured_gradient.h)
  NodeState state = NodeState::kWaiting;
  // Among those that are looked at as a whole (flush_graph.h, split_graph.cpp).
  uint32_t number = kNone;

  bool is_to_run() const { return state == NodeState::kChosen || state == NodeState::kNeeded; }
};

// A tensor that the graph reads and did not make. Held for the scope's life, so that the index
// identifies it: an address could be reused.
struct GraphInput {
  at::Tensor tensor;     // what the user passed; until the flush: it may come to depend on us
  at::Tensor data;       // what is read: detached; a copy if the memory is not PyTorch's own
  bool is_copy = false;  // data does not share the tensor's memory
  bool is_odd = false;   // overlaps itself with no stride 0 (unfold): left to eager
  at::Tensor as_read;    // what `data` held when it was read, where that may change (overwrites.h)
  // Of a copy: the tensor's own, where data's may be another. Strides of results follow from it.
  const Geometry* given = nullptr;
  // The version counter, and what it said, unless a write can't matter (a private copy).
  c10::VariableVersion counter;
  uint32_t version = 0;
  bool counted = false;
  torch::autograd::Edge edge;  // where its gradient goes; after the flush held where it is needed
  const torch::autograd::Node* gradient_to = nullptr;  // the node of that, then
  bool is_weight = false;                              // its identity stands in signatures
  uint64_t serial = 0;  // that identity: not reused while the graph has nodes
  ValueId value = kNone;
};

// A captured write to a region of memory: from then on `source` stands there.
struct Write {
  const Geometry* geometry = nullptr;
  int64_t offset = 0;
  ValueId source = kNone;
};

// The memory of a base that captured ops have written to. Values themselves never change: a write
// makes another value stand in the memory, and pending tensors look at memory.
struct Memory {
  ValueId content = kNone;        // what stands there, but for `writes`
  std::vector<Write> writes;      // since; no two overlap
  std::vector<ValueId> contents;  // the present and all former ones
  // By a view over the base: what it stands for since the last write.
  std::unordered_map<ValueId, ValueId> views;
  ValueId written = 0;   // values from here on came after the last write
  uint32_t version = 0;  // writes so far
  bool requires_grad = false;
};

// The arenas. After a flush they move into the record that backward walks.
struct Tape {
  PooledVector<Node> nodes;
  PooledVector<Value> values;
  PooledVector<ValueId> operands;  // kNone: an optional tensor that was not given
  PooledVector<Use> uses;  // by operand, of the nodes that a read has seen (flush_progress.cpp)
  std::vector<GraphInput> graph_inputs;
  // By content of a written memory: the number of nodes when it was last written to. What earlier
  // nodes had read of it is no longer there, which is an error in backward if eager saves it.
  std::unordered_map<ValueId, NodeId> written_at;
  // By the last content of a written memory: the version its tensors have.
  std::unordered_map<ValueId, uint32_t> versions;
  std::unordered_map<ValueId, Aparts> aparts;  // by view

  const Apart* find_apart(ValueId id, ValueId of) const;
  // Of a value whose elements share memory: that whose elements they can be told among; itself,
  // where it is not a view of another such value that it has each element of once at most.
  ValueId counted_in(ValueId id) const;
  // Whether the view tells which of the elements of `of`, which share memory, it is of.
  bool tells_apart(ValueId view, ValueId of) const {
    return find_apart(view, counted_in(of)) != nullptr;
  }
  // What `from` notes of the value `id`, for what is value `to` here. `number`: that of a value
  // there, here; kNone of those that are not.
  template <class Number>
  void take_aparts(ValueId to, const Tape& from, ValueId id, const Number& number) {
    const auto known = from.aparts.find(id);
    if (known == from.aparts.end()) return;
    Aparts& here = aparts[to];
    for (Apart apart : known->second) {
      apart.of = number(apart.of);
      if (apart.of != kNone) here.push_back(apart);
    }
  }
  // Whether a pending tensor stands for the value or a view of it.
  bool is_looked_at(ValueId base) const;
  // Whether a node that waits reads the value or a view of it. Of nodes that a read has seen.
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

// A part of a graph that is flushed alone, and what the rest needs of it.
struct Split {
  struct Export {
    ValueId value = kNone;     // in `tape`
    uint32_t graph_input = 0;  // of the rest: what stands for it there
  };
  Tape tape;
  std::vector<Export> exports;
  // The former numbers of its nodes and values, in order, where they have other ones now.
  bool is_renumbered = false;
  std::vector<NodeId> nodes;
  std::vector<ValueId> values;
};

// What became of an export: its tensor, or why there is none.
struct Computed {
  at::Tensor tensor;
  std::shared_ptr<const std::string> lost;
};

// The tape being written, with the index from tensors to graph inputs.
class Graph {
 public:
  explicit Graph(std::shared_ptr<GeometryTable> geometries);
  ~Graph();  // live pending tensors become lost
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  const Tape& tape() const { return tape_; }
  GeometryTable& geometries() { return *geometries_; }
  // Interns into another table from now on. The graph must be empty.
  void use(std::shared_ptr<GeometryTable> geometries) { geometries_ = std::move(geometries); }
  bool empty() const { return tape_.nodes.empty(); }
  const Value& value(ValueId id) const { return tape_.values[id]; }

  // The value of an argument: a pending tensor's own, or that of a graph input, registered
  // on first sight.
  ValueId value_of(const at::Tensor& tensor, bool weight = false);
  // Another number for each time that values were given other numbers.
  uint64_t numbering() const { return numbering_; }
  // Whether the graph input, which `id` stands for in this numbering, still is what it was.
  bool still_is(ValueId id, const at::Tensor& tensor) const;
  // The value of a graph input seen before and unchanged since; kNone if there is none.
  ValueId find_graph_input(const at::Tensor& tensor) const;
  ValueId find_graph_input(const at::Tensor& tensor, bool requires_grad) const;
  // What the value of a graph input would be. False if it would be that of a copy.
  bool describe_graph_input(const at::Tensor& tensor, Value& value) const;
  // As value_of, but tensors over the same memory count as one (`W.t()` written out in each
  // instance makes a new tensor object every time).
  ValueId weight_value_of(const at::Tensor& tensor);

  // The value is read with gradients on: if it is of a graph input, its edge is taken. Here and
  // not at the flush, because eager's error about a view that lost its base comes from there.
  void need_gradient(ValueId id);

  ValueId add_view(ValueId parent, const Geometry* geometry, int64_t offset, bool requires_grad,
                   ViewKind kind = ViewKind::kPlain);
  void note_aparts(ValueId view, Aparts aparts) { tape_.aparts.emplace(view, std::move(aparts)); }
  // To autograd they are the results of one node (`split`).
  void note_siblings(at::ArrayRef<ValueId> views);
  NodeId add_node(Signature* signature, at::ArrayRef<ValueId> operands);
  ValueId add_result(NodeId node, const Geometry* geometry, c10::ScalarType dtype,
                     c10::Device device, bool requires_grad);

  void attach(ValueId id, PendingTensor* tensor);
  // Its pending tensor is gone, or no longer pending.
  void detach(ValueId id) {
    (lent_to_ != nullptr ? *lent_to_ : tape_).values[id].tensor = nullptr;
    if (progress_ != nullptr) died_.push_back(id);
  }
  // The tensor is gone, on another thread than its graph's (Python's garbage collector may run on
  // any): takes a note, for the owner to act on.
  static void note_orphan(PendingTensor& tensor);

  // --- memory that was written to (deferred_writes.h) ---

  // Of the base, or null if nothing was written to it.
  Memory* memory_of(ValueId base);
  Memory& make_memory(ValueId base);
  bool has_writes() const { return !memories_.empty(); }
  std::unordered_map<ValueId, Memory>& memories() { return memories_; }
  // Once all of it was settled: tensors stand for what is there.
  void forget_memories() { memories_.clear(); }
  // Whether `id` is a whole result of an op on graph inputs alone, or on nothing, that nothing else
  // looks at and nothing was written to.
  bool is_fresh(ValueId id) const;
  // What stands where `id` looks: `id` itself if nothing was written there. Writes that overlap it
  // in part must have been assembled.
  ValueId current(ValueId id);
  // The same where one value stands there, else kNone.
  ValueId settled(ValueId id) {
    if (memories_.empty() || raw_) return id;
    Memory* memory = memory_of(tape_.values[id].base);
    if (memory == nullptr) return id;
    return memory->writes.empty() ? view_of_content(*memory, id) : kNone;
  }
  bool is_written(ValueId id) const {
    return !memories_.empty() && memories_.count(tape_.values[id].base) != 0;
  }
  // Whether reading `id` now gives something that requires grad.
  bool requires_grad_now(ValueId id) const {
    const Value& value = tape_.values[id];
    if (memories_.empty() || raw_) return value.requires_grad;
    const auto found = memories_.find(value.base);
    return found == memories_.end() ? value.requires_grad : found->second.requires_grad;
  }
  // While one lives, pending tensors stand for their own values, whatever was written since.
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

  // Whether a pending op reads memory of this tensor's storage.
  bool reads_storage_of(const at::Tensor& tensor) const;
  template <class Visit>
  void for_each_graph_input(const Visit& visit) {
    for (GraphInput& graph_input : tape_.graph_inputs) visit(graph_input);
  }

  // Whether a write to memory of this tensor's storage waits (running_statistics.h): nothing
  // captured may read it.
  bool is_stale(const at::Tensor& tensor) const;
  bool has_stale() const { return !stale_.empty(); }
  // Nothing pending reads it.
  void note_stale(const at::Tensor& tensor);
  void forget_stale() { stale_.clear(); }

  // What tells the value apart from others that may stand in its place in a batch.
  uint64_t identity(const Value& value) const;
  // That of a graph input that requires grad and is still to be met, `ahead` others before it.
  uint64_t identity_of_new(uint32_t ahead) const;

  // Acts on the notes of other threads. Owner only; before values' tensors are looked at.
  void settle_orphans();

  // Empties the graph and hands the tape over; pending tensors must have been dealt with.
  Tape take();

  // --- parts that are computed while the rest waits (flush_progress.cpp) ---

  // The nodes to be run, in order: what the targets need, and whatever else has the signature of
  // one of those and waits for nothing outside the part, for it would run in the same batches now
  // or make batches of its own later. Without targets all that somebody can reach. What nobody can
  // reach is forgotten. Takes time for what is chosen, and for what has changed since the last.
  std::vector<NodeId> choose(at::ArrayRef<ValueId> targets);
  // So many nodes and more that wait for nothing else, those first that have the most of their
  // signature to run with.
  std::vector<NodeId> choose_ready(size_t least);
  // What runs in about the time that `costs` allows, by turns: the signature of which most nodes
  // are ready, with all of these or, where they take longer, with those that were ready first. In a
  // round each signature has one turn. So a node runs in the round after that in which it became
  // ready at the latest, or where not all fit in its signature's turn, as soon as those have that
  // were ready before it.
  std::vector<NodeId> choose_slice(SliceCosts& costs);
  // The nodes that are still to be run.
  size_t num_waiting() const { return tape_.nodes.size() - num_finished_; }
  bool is_computed(NodeId id) const { return tape_.nodes[id].state == NodeState::kComputed; }
  // Whether a new node may read the result; if it was computed, its memory is kept from now on
  // until nothing looks at it.
  bool may_be_read(ValueId base);
  size_t num_computed() const { return num_computed_; }
  // Of what was chosen, these were run, and their results lie in the open record's slabs: later
  // nodes may read them there. `all`: nothing failed, so what else was chosen is needed no more.
  void note_computed(at::ArrayRef<NodeId> chosen, at::ArrayRef<NodeId> ran, bool all);
  // Lets the memory of a computed result go, if nothing looks at it any more.
  void review(ValueId base);
  // The record of what was computed and stays in the graph (incremental_flush.h); null if there is
  // none.
  const std::shared_ptr<FlushRecord>& open_record() const { return open_record_; }
  void set_open_record(std::shared_ptr<FlushRecord> record) { open_record_ = std::move(record); }
  // While one lives, the open record has the tape, and nothing may be asked of the graph.
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

  // Takes out what was computed and what was chosen for the targets; the rest stays, under the same
  // numbers. Written memory must have been settled (deferred_writes.h). Takes time for what is
  // taken out.
  Split split(at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> chosen,
              SignatureTable& signatures);
  // All of it.
  Split split();
  // After the split part was computed: what stands for its exports. Whatever depends on one that is
  // lost is lost as well.
  void fill_exports(const Split& split, at::ArrayRef<Computed> exports);
  // Numbers what is left anew, where most of the tape is not needed any more.
  void compact();

 private:
  friend class Splitter;
  friend class Compactor;
  struct Progress;
  // What the tensor of `id` stands for in written memory: one value for all reads through it.
  ValueId view_of_content(Memory& memory, ValueId id);
  void bury_orphans();  // with the mutex
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
  void note_readers(NodeId id, std::vector<NodeId>& chosen);

  std::shared_ptr<GeometryTable> geometries_;
  Tape tape_;
  Tape* lent_to_ = nullptr;
  std::shared_ptr<FlushRecord> open_record_;
  std::unique_ptr<Progress> progress_;  // from the first read on
  std::vector<ValueId> died_;           // whose tensors have gone since the last
  size_t num_computed_ = 0;             // in the open record
  size_t num_finished_ = 0;             // nodes that are not to be run: these, and those gone
  std::unordered_map<ValueId, Memory> memories_;  // by base
  bool raw_ = false;
  // Tensors that died on another thread, whose memory is kept, and what they stood for when they
  // did.
  std::vector<std::pair<PendingTensor*, ValueId>> orphans_;
  uint32_t next_serial_ = 0;
  uint32_t next_trained_ = 0;  // of those that require grad
  uint64_t numbering_ = 0;
  uint16_t last_call_ = 0;
  uint64_t renumbered_ = 0;  // more than any former number of a value
  ska::flat_hash_map<const c10::TensorImpl*, ValueId> graph_input_index_;
  std::unordered_multimap<const void*, ValueId> weight_index_;  // by data pointer
  std::unordered_set<const c10::StorageImpl*> stale_;
};

}  // namespace autobatch

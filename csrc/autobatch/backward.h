// Backward over a flush: the batches are walked in reverse, over the members that a gradient has
// reached, and gradients are accumulated in place into one flat buffer a slab.
#pragma once

#include "autobatch/batch.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace autobatch {

// A contribution `left^T right` to a weight's gradient, [p, q] from [rows, p] and [rows, q]; or,
// where `right` is undefined, the sum of `left` over its rows, [p]. Collected over the whole
// backward so that a weight used in many batches takes one GEMM.
struct Product {
  at::Tensor left;
  at::Tensor right;
};

// A held value that the nodes of a later level read: their gradient goes to its own autograd node.
struct Export {
  ValueId value = kNone;
  uint32_t held = kNone;  // index into FlushRecord::held
  // Where its gradient lies in a buffer: as the value in its base, but that elements which share
  // memory (of `expand`) have gradients of their own.
  const Geometry* geometry = nullptr;
  int64_t offset = 0;
  int64_t length = 0;  // of the buffer
};

// Of what `level` sends to the held value `held`.
inline uint64_t export_key(uint32_t level, ValueId held) {
  return static_cast<uint64_t>(level) << 32 | held;
}

// The nodes of one level, batch by batch. A level ends where a value that the user holds is used
// again; there is one, unless such values exist.
struct Level {
  // Of a node whose one result the user holds and another is computed from (Rule::chain).
  enum class Half : uint8_t { kWhole, kChain, kRest };
  struct Part {
    uint32_t batch;
    uint32_t first;  // into FlushRecord::level_order
    uint32_t count;
    Half half = Half::kWhole;
    // Where its members' gradients lie in two buffers (parts.cpp): a member of the second one.
    uint32_t other = 0;
  };
  std::vector<Part> parts;
};

// The memory of held tensors, as it was left by the flush.
struct HeldMemory {
  ValueId base = kNone;
  c10::VariableVersion counter;
  uint32_t version = 0;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // it begins with the base's first element
  // The same storage if a tensor with another version counter shares it, else null. Eager's saved
  // tensors keep the storage alive, so the record does too.
  c10::Storage kept;
};

// A held tensor that the user has written to through `x.data` or the like. Its version counter does
// not show the write (overwrites.h).
struct UnseenWrite {
  ValueId base = kNone;  // the computed value that the tensor was made from
  at::Tensor now;        // 1-D; what the whole memory of the tensor holds now
};

struct HeldValue {
  ValueId value = kNone;
  uint32_t level = 0;
};

class Replay;
class Trace;
class Written;

// Of a body (body.h): views of one value that share no element and together are all of it, as the
// gates are of a product. A gradient that comes to one of them first is written there, so that
// their buffer need not be filled with zeros before.
struct Tiling {
  static constexpr uint8_t kNone = 0xFF;

  std::vector<uint8_t> number;              // by value: which tile of its base it is, or kNone
  std::vector<std::vector<ValueId>> tiles;  // by base: at most 64
  std::vector<uint8_t> alone;               // by base: one operand of one node reads it, whole
};

// The state of one backward pass (one graph task of autograd's engine).
struct BackwardTask {
  BackwardTask();
  ~BackwardTask();

  std::vector<at::Tensor> grads;     // of results, by Place::grad; undefined before and after use
  std::vector<uint32_t> parts_left;  // likewise: parts of levels that still have to read it
  std::vector<uint8_t> begun;        // by result: its place there holds something
  std::vector<at::Tensor> outside_grads;  // by outside tensor; 1-D, undefined until touched
  std::vector<at::Tensor> export_grads;   // by export; 1-D, undefined until touched
  std::vector<uint8_t> level_done;        // by level
  std::vector<uint8_t> level_waits;       // by level: a held value's gradient came since it ran
  std::vector<uint8_t> consumed;          // by node: differentiated in this pass
  std::vector<uint8_t> reached;           // by node
  std::vector<uint8_t> outside_wanted;    // by outside tensor
  std::unordered_map<ValueId, std::vector<Product>> products;  // by weight value
  std::unique_ptr<Written> written;  // null if nothing was, since its capture
  bool any_kept = false;             // of some outside tensor what was read is kept (overwrites.h)
  std::vector<UnseenWrite> unseen;   // before this pass; sorted by base
  std::unique_ptr<Replay> replay;    // with create_graph, or for gradients of a transform
  std::vector<uint32_t> feeders_left;  // by level: of the record's feeders, those still to run
  bool reopened = false;               // some level was run again
  std::vector<uint32_t> finished;   // batches that are differentiated, and whose values still lie
  const Tiling* tiling = nullptr;   // of a body
  std::vector<uint64_t> unwritten;  // likewise by base: a bit for each tile that holds nothing yet
};

// All that a flush leaves behind while something may still be differentiated.
struct FlushRecord {
  Tape tape;
  Store store;
  std::shared_ptr<void> tables;  // owns the geometries and signatures that the tape points to
  std::vector<NodeId> order;     // live nodes, batch after batch
  std::vector<BatchRecord> batches;
  std::shared_ptr<Trace> trace;  // of the scope; mostly null

  std::vector<HeldValue> held;
  // The autograd nodes, if these still exist, that gradients come from to a level, and to those
  // below: the held values', to the level of each, and the exits, to the one below theirs.
  std::vector<std::pair<const void*, uint32_t>> feeders;
  std::vector<HeldMemory> memories;
  std::vector<uint8_t> is_held;       // by value: held, requires grad, and read again
  std::vector<uint32_t> value_level;  // by result; empty where nothing held is read again
  std::vector<uint8_t> is_divided;    // by node: differentiated in two halves; empty likewise
  std::vector<NodeId> level_order;    // `order` regrouped by level
  std::vector<Level> levels;
  std::vector<Export> exports;                          // of all levels
  GeometryTable apart_geometries;                       // that no value has
  std::unordered_map<uint64_t, uint32_t> export_index;  // by export_key

  std::mutex mutex;
  std::vector<uint8_t> consumed;  // by node: differentiated without retain_graph
  size_t num_unconsumed = 0;
  bool freed = false;     // no values any more, only what they look like
  bool verified = false;  // what is computed again is compared with what was computed
  std::unordered_map<int, std::unique_ptr<BackwardTask>> tasks;  // by graph task

  // The value through whose autograd node a gradient for `id` goes, or kNone: the nearest held
  // one on the way from `id` to its base.
  ValueId cut(ValueId id) const;
  bool divided(NodeId node) const { return !is_divided.empty() && is_divided[node] != 0; }
  // Where the elements of `cut`, a value that shares memory with itself, or of a view of it, have
  // gradients of their own.
  Apart apart(ValueId id, ValueId cut);
  // Whether what was computed for `id` is still there.
  bool has_values(ValueId id) const;
  void free_saved();
  void free_slab(uint32_t number);
};

// Of a body (body.h): the batch that it is run for, which has its weights' gradients.
class Enclosing {
 public:
  // The gradient of an outside tensor that is a weight.
  virtual Region target(uint32_t outside) = 0;
  // Where the gradient of member m's belongs, if it can be added there at once; else no buffer.
  virtual Region member_target(uint32_t outside, int64_t m) = 0;
  virtual bool is_weight(uint32_t outside) const = 0;
  // For the gradient of a value of all members: 1-D, uninitialized.
  virtual at::Tensor gradient_memory(ValueId base, int64_t length) = 0;
  virtual void add_product(uint32_t outside, const Product& product) = 0;
  virtual void check_unwritten() const = 0;
  // Which of the body's results a gradient has come to: bit k.
  virtual uint8_t reached() const = 0;

 protected:
  ~Enclosing() = default;
};

// Where gradients go: resolves a value to its region in the task's buffers, and notes what was
// reached.
class GradientSink {
 public:
  GradientSink(FlushRecord& record, BackwardTask& task, uint32_t level)
      : record_(record), task_(task), level_(level) {}
  // Of a body, for so many members: buffers have a row for each.
  GradientSink(FlushRecord& record, BackwardTask& task, Enclosing& enclosing, int64_t count)
      : record_(record), task_(task), level_(0), enclosing_(&enclosing), count_(count) {}

  bool wanted(ValueId id) const;
  // The gradient region of `id`, zero-filled if new. Marks it reached.
  Region target(ValueId id) { return resolve(id, record_.cut(id), false); }
  // The same for scatter_add and add_regions: one of a whole result that is new is `fresh`. They
  // must follow before anything else asks for it.
  Region target_to_add(ValueId id) { return resolve(id, record_.cut(id), true); }
  // Whether that would be `fresh`.
  bool is_fresh(ValueId id) const;
  // The same, or no buffer where no gradient is wanted.
  Region target_if_wanted(ValueId id);
  // As target, but past a cut at `id` itself: for the gradient that arrives at a held value.
  Region target_behind(ValueId id);
  // The gradient of a computed result, or an undefined buffer if nothing has touched its slab.
  Region gradient(ValueId id) const;
  BackwardTask& task() { return task_; }
  Enclosing* enclosing() { return enclosing_; }
  // The buffer for the gradient of a computed result; zeros if nothing has arrived.
  at::Tensor& buffer(ValueId base);
  // Before the gradients of these nodes' results are read: zeros where nothing has arrived.
  void complete(std::span<const NodeId> nodes);
  // That a gradient has reached it: it is in a buffer that was not asked for by target().
  void mark_reached(const Value& value);
  // Of a body: where the gradient of `id` is to be written, if it is the first in a tile; else no
  // buffer. Marks it reached.
  Region fresh(ValueId id);
  // Of a body: the buffer of the gradient of an operand that is all of its base, where nothing has
  // arrived yet, for a gradient to become it; else null. Marks it reached.
  at::Tensor* untouched(ValueId id);
  // The buffer of the gradient of an outside tensor as a whole, where nothing has arrived yet, for
  // the caller to make and fill; else null.
  at::Tensor* untouched_outside(ValueId id);
  // Zeros in the tiles of `base` that nothing was written to: before it is read as a whole.
  void fill_rest(ValueId base);
  // Whether nothing else will be added to the gradient of `id`.
  bool is_alone(ValueId id) const;
  // The elements from the gradient of one member of a body to that of the next.
  int64_t step(ValueId id) const;
  // Of a body: the buffer of a result's gradient or an operand's; undefined if nothing arrived.
  at::Tensor& gradient_of_base(ValueId base);

 private:
  Region resolve(ValueId id, ValueId cut, bool may_be_fresh);
  Region begin(ValueId id, bool may_be_fresh);
  void clear(ValueId base);
  void fill_before_adding(ValueId id);

  FlushRecord& record_;
  BackwardTask& task_;
  uint32_t level_;
  Enclosing* enclosing_ = nullptr;
  int64_t count_ = 1;
};

// What a rule's backward sees: the members that were reached, their operands, results and the
// results' gradients; and where to add the operands' gradients.
class BackwardBatch final : public BatchView {
 public:
  BackwardBatch(FlushRecord& flush, BatchRecord& record, NodeSpan members, GradientSink& sink,
                Level::Half half = Level::Half::kWhole, std::span<const int64_t> rows = {});
  // The same for some of the members.
  BackwardBatch part(std::span<const NodeId> members) {
    return {flush_, record_, members, sink_, half_};
  }

  // Whether Rule::backward_chain has been run for these members.
  bool chained() const { return half_ == Level::Half::kRest; }
  // Adds to the gradient of result k, [n, *sizes], at its autograd node if it is held.
  void add_to_result(size_t k, const at::Tensor& gradient);

  // Whether these are all members of the batch: then what forward kept can be used as it is.
  bool complete() const { return members_.size() == record_.count; }
  // Which results of member m a gradient has reached: bit k of result k, the last one of all later.
  uint8_t reached(int64_t m) const { return sink_.task().reached[members_[m]]; }
  NodeId member(int64_t m) const { return members_[m]; }
  // In a body: which of its results a gradient has come to.
  uint8_t reached_of_body() const { return sink_.enclosing()->reached(); }
  // Where these stand among all members.
  std::vector<int64_t> positions() const;

  // Raises eager's error if an operand is no longer what forward read: before it is read again.
  void check_unwritten() const;
  // The same of one operand that is read now, for what eager may save of longer instances only.
  void check_unwritten(size_t slot) const;

  // Results, hidden ones too.
  at::Tensor result_stacked(size_t k) { return stacked_of(located_results(k)); }
  at::Tensor result_rows(size_t k, int64_t width) { return rows_of(located_results(k), width); }
  at::Tensor result_flat(size_t k) { return flat_of(located_results(k)); }
  // Gradients of results; zeros where nothing arrived.
  at::Tensor grad_stacked(size_t k) { return stacked_of(located_gradients(k)); }
  at::Tensor grad_rows(size_t k, int64_t width) { return rows_of(located_gradients(k), width); }
  at::Tensor grad_flat(size_t k) { return flat_of(located_gradients(k)); }

  // As in forward, and the gradient goes to the same place for every member: one that was
  // detached shares the memory but not the gradient.
  bool shared(size_t slot) override;
  // Whether any member's operand wants a gradient.
  bool needs(size_t slot);

  // Adds [n, *sizes], or any shape of the same elements in the same order. A gradient that nobody
  // else holds may become the buffer itself.
  void add(size_t slot, const at::Tensor& gradient);
  void add(size_t slot, at::Tensor&& gradient);
  // Where to write the gradient, [n, *sizes], if it is the first one there and the members' lie
  // side by side; else undefined: it has to be added. What this gives must be filled.
  at::Tensor fresh(size_t slot);
  // As add, of the gradient of a result as it is, which the operand's may share memory with.
  void pass_on(size_t slot, const at::Tensor& gradient);
  // For a shared operand: adds [*sizes], summed over the members by the caller.
  void add_single(size_t slot, const at::Tensor& gradient);
  // For a shared operand: adds left^T right, or the row sum of left; see Product. Deferred to the
  // end of the backward pass if the operand is an outside tensor.
  void add_product(size_t slot, const at::Tensor& left, const at::Tensor& right);

  // Operands that were repeated to their result's number of elements: sums the repetitions.
  void add_repeated(size_t slot, const at::Tensor& gradient);
  // For a shared matrix looked up by row: index_add_rows.
  void add_rows(size_t slot, const at::Tensor& indices, const at::Tensor& rows, int64_t skip,
                at::IntArrayRef times = {});

  // --- regions, for rules that copy pieces ---
  bool wanted(ValueId id) const { return sink_.wanted(id); }
  Region target(int64_t m, ValueId id) {
    if (!in_body()) return sink_.target(id);
    const Value& value = tape_.values[id];
    if (value.is_outside()) {
      const Region there = sink_.enclosing()->member_target(value.index, m);
      if (there.buffer != nullptr) return there;
    }
    Region region = sink_.target(id);
    region.offset += m * sink_.step(id);
    return region;
  }
  // GradientSink::target_to_add.
  Region target_to_add(int64_t m, ValueId id) {
    return in_body() ? target(m, id) : sink_.target_to_add(id);
  }
  Region grad_region(int64_t m, size_t k) {
    const ValueId id = node(m).first_value + static_cast<ValueId>(k);
    Region region = sink_.gradient(id);
    if (in_body()) region.offset += m * sink_.step(id);
    return region;
  }

  // --- one member at a time, for what a loop ran ---
  const LocalGraph& member_local(int64_t m);
  at::Tensor member_grad(int64_t m, size_t k);
  void member_add(int64_t m, size_t slot, const at::Tensor& gradient);

 private:
  at::Tensor fresh_side_by_side(size_t slot);
  at::Tensor* untouched(size_t slot, const at::Tensor& gradient);
  at::Tensor* untouched_of_all(size_t slot, const at::Tensor& gradient);
  bool lies_evenly(size_t k) const;
  template <class RegionOf>
  Located located(bool even, int64_t step, const RegionOf& region_of);
  Located located_results(size_t k);
  bool has_even_gradients(size_t k) const;
  Located located_gradients(size_t k);
  Located targets(size_t slot, bool& all);
  static at::Tensor stacked_of(const Located& located);
  static at::Tensor rows_of(const Located& located, int64_t width);
  static at::Tensor flat_of(const Located& located);

  FlushRecord& flush_;
  GradientSink& sink_;
  Level::Half half_;
};

// The state of a new backward pass; `wanted` says for each outside tensor whether its gradient is.
std::unique_ptr<BackwardTask> make_task(const FlushRecord& record, std::vector<uint8_t> wanted);
// Runs the levels down to `last` that have not been run, those that may have got a gradient: the
// parts of each in reverse, over the reached nodes. A level comes before those below it, for it may
// send gradients there.
void run_levels(FlushRecord& record, BackwardTask& task, uint32_t last, bool keep_graph);
// Before a gradient is added to a held value of the level. Where that level, or one below it, has
// been run, what is left is run too, and they are then ready to run again on what comes from now
// on: backward is linear in it.
void expect_gradient(FlushRecord& record, BackwardTask& task, uint32_t level, bool keep_graph);
// Eager's error for what was differentiated already, without retain_graph.
[[noreturn]] void raise_consumed(const std::string& op);
// Before a node is computed again: raises eager's errors if it was differentiated without
// retain_graph, or an outside tensor that it reads was written to.
void check_computable(const FlushRecord& record, NodeId node);
// Adds a product to the region of a gradient.
void add_to(const Region& region, const Product& product);
// Turns the products collected for outside tensors into gradients, in as few GEMMs as pays.
void run_products(FlushRecord& record, BackwardTask& task);
// The same of one weight, once there are enough of them for a GEMM that is worth it: they hold on
// to the memory of their factors.
void run_many_products(FlushRecord& record, BackwardTask& task, ValueId weight);

}  // namespace autobatch

// What a flush leaves behind while something may still be differentiated, and the state of a
// backward pass over it.
#pragma once

#include "autobatch/rules/batch.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace autobatch {

// A contribution `left^T right` to a weight's gradient, [p, q] from [rows, p] and [rows, q]; or,
// where `right` is undefined, the sum of `left` over its rows, [p]. Collected over the whole
// backward so that a weight used in many batches takes one GEMM.
struct WeightGradTerm {
  at::Tensor left;
  at::Tensor right;
};

// A held value that the nodes of a later level read: their gradient goes to its own autograd node.
struct LevelExport {
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
  // Of a node whose one result the user holds and another is computed from
  // (Rule::result_dependency).
  enum class Half : uint8_t { kWhole, kChain, kRest };
  struct Part {
    uint32_t batch;
    uint32_t first;  // into FlushRecord::level_order
    uint32_t count;
    Half half = Half::kWhole;
    // Where its members' gradients lie in two buffers (chunk_backward.cpp): a member of the second
    // one.
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

class Recompute;
class Trace;
class Written;

// Of a subgraph (subgraph.h): views of one value that share no element and together are all of it,
// as the gates are of a product. A gradient that comes to one of them first is written there, so
// that their buffer need not be filled with zeros before.
struct Partition {
  static constexpr uint8_t kNone = 0xFF;

  std::vector<uint8_t> number;              // by value: which tile of its base it is, or kNone
  std::vector<std::vector<ValueId>> tiles;  // by base: at most 64
  std::vector<uint8_t> alone;               // by base: one operand of one node reads it, whole
};

// The state of one backward pass (one graph task of autograd's engine).
struct BackwardTask {
  // What autograd's engine has brought to a held value.
  struct Arrived {
    uint32_t level;
    ValueId value;
    at::Tensor gradient;  // as `plain`
  };

  BackwardTask();
  ~BackwardTask();

  std::vector<at::Tensor> grads;  // of results, by Allocation::grad; undefined before and after use
  std::vector<uint32_t> parts_left;  // likewise: parts of levels that still have to read it
  std::vector<uint8_t> begun;        // by result: its place there holds something
  std::vector<at::Tensor> graph_input_grads;  // by graph input; 1-D, undefined until touched
  std::vector<at::Tensor> export_grads;       // by export; 1-D, undefined until touched
  std::vector<at::Tensor> export_zeros;       // likewise: what it is to be, made with its level's
  std::vector<Arrived> arrived;               // and is not yet in `grads`
  std::vector<uint8_t> level_done;            // by level
  std::vector<uint8_t> level_waits;           // by level: a held value's gradient came since it ran
  std::vector<uint8_t> consumed;              // by node: differentiated in this pass
  std::vector<uint8_t> reached;               // by node
  std::vector<uint8_t> graph_input_wanted;    // by graph input
  std::unordered_map<ValueId, std::vector<WeightGradTerm>> products;  // by weight value
  std::unique_ptr<Written> written;    // null if nothing was, since its capture
  bool any_kept = false;               // of some graph input what was read is kept (overwrites.h)
  std::vector<UnseenWrite> unseen;     // before this pass; sorted by base
  std::unique_ptr<Recompute> replay;   // with create_graph, or for gradients of a transform
  std::vector<uint32_t> feeders_left;  // by level: of the record's feeders, those still to run
  bool reopened = false;               // some level was run again
  std::vector<uint32_t> finished;  // batches that are differentiated, and whose values still lie
  const Partition* partition = nullptr;  // of a subgraph
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
  std::vector<uint32_t> depths;  // of an open record, by node that ran: Report::depth up to it

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
  std::vector<LevelExport> exports;                     // of all levels
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

// Eager's error for what was differentiated already, without retain_graph.
[[noreturn]] void raise_consumed(const std::string& op);

}  // namespace autobatch

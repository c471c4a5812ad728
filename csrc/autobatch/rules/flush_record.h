// The state that a flush keeps for backward, and the state of a backward pass over the flush.
#pragma once

#include "autobatch/graph/held_memory.h"
#include "autobatch/rules/batch.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace autobatch {

// A contribution to a weight's gradient. It is `left^T right`, [p, q], where `left` is [rows, p]
// and `right` is [rows, q]. If `right` is undefined, the contribution is the sum of `left` over its
// rows, [p]. Contributions are collected during the backward pass. The gradient of a weight that
// many batches use then needs only a few GEMMs.
struct WeightGradTerm {
  at::Tensor left;
  at::Tensor right;
};

// A held value that nodes of a later level read. The autograd node of the held value receives the
// gradient from these nodes.
struct LevelExport {
  ValueId value = kNone;
  uint32_t held = kNone;  // index into FlushRecord::held
  // The place of the gradient in an export buffer. This place is equal to the value's place in its
  // base, with one exception: elements that share memory (after `expand`) have separate gradients.
  const Geometry* geometry = nullptr;
  int64_t offset = 0;
  int64_t length = 0;  // number of elements of the buffer
};

// The key in FlushRecord::export_index of the gradients that `level` sends to the held value
// `held`.
inline uint64_t export_key(uint32_t level, ValueId held) {
  return static_cast<uint64_t>(level) << 32 | held;
}

// The nodes of one level, batch by batch. A level ends at a value that the user holds and that
// later nodes read. If later nodes read no held value, there is one level.
struct Level {
  // The part of a node's backward that runs. A node's backward is divided if the user holds one of
  // its results and the node computes another result from the held result
  // (Rule::result_dependency). kChain is Rule::backward_chain, and kRest is everything else.
  enum class Half : uint8_t { kWhole, kChain, kRest };
  struct Part {
    uint32_t batch;
    uint32_t first;  // index in FlushRecord::level_order
    uint32_t count;
    Half half = Half::kWhole;
    // If the members' gradients are in two buffers (chunk_backward.cpp), the index of a member
    // whose gradient is in the second buffer. Otherwise 0.
    uint32_t other = 0;
  };
  std::vector<Part> parts;
};

// A held tensor that the user has written to, for example through `x.data`. The tensor's version
// counter does not show the write (overwrites.h).
struct UnseenWrite {
  ValueId base = kNone;  // the computed value that the tensor was made from
  at::Tensor now;        // 1-D: the present content of the whole memory of the tensor
};

struct HeldValue {
  ValueId value = kNone;
  uint32_t level = 0;
};

class Recompute;
class Trace;
class Written;

// Used in a subgraph (subgraph.h). The tiles of a value are views that do not overlap. Together
// they cover the value. For example, if one product computes all gates of a cell, each gate is a
// tile of the product's result. The first gradient of a tile is written and not added, so the
// buffer need not be filled with zeros.
struct Partition {
  static constexpr uint8_t kNone = 0xFF;

  std::vector<uint8_t> number;  // by value: the index of its tile in `tiles` of its base, or kNone
  std::vector<std::vector<ValueId>> tiles;  // by base: its tiles, at most 64 views
  std::vector<uint8_t> alone;  // by base: whether it is read by one operand only, as a whole
};

// The state of one backward pass (one graph task of autograd's engine).
struct BackwardTask {
  // A gradient that autograd's engine has passed to a held value.
  struct Arrived {
    uint32_t level;
    ValueId value;
    at::Tensor gradient;  // contiguous, with no pending conjugation (`plain`)
  };

  BackwardTask();
  ~BackwardTask();

  // By Allocation::grad: buffers of gradients of results. A buffer is undefined before and after
  // its use.
  std::vector<at::Tensor> grads;
  // By Allocation::grad: number of parts of levels that have not yet read the gradient.
  std::vector<uint32_t> parts_left;
  std::vector<uint8_t> begun;                 // by result: whether its range in `grads` is written
  std::vector<at::Tensor> graph_input_grads;  // by graph input: 1-D, undefined until used
  std::vector<at::Tensor> export_grads;       // by export: 1-D, undefined until used
  // By export: a zero-filled view that becomes the entry in `export_grads`. The views for all
  // exports of a level that have the same dtype and device share one allocation.
  std::vector<at::Tensor> export_zeros;
  std::vector<Arrived> arrived;     // gradients that are not yet added to `grads`
  std::vector<uint8_t> level_done;  // by level: whether the level has been run
  // By level: whether a held value has received a gradient after the last run of the level.
  std::vector<uint8_t> level_waits;
  std::vector<uint8_t> consumed;  // by node: whether this pass has consumed the node
  // Shared nodes that have received a gradient from a reader that was consumed before this pass.
  std::unordered_set<NodeId> shared_again;
  // By node. Bit k is set if a gradient has reached result k. Bit 7 represents result 7 and all
  // later results.
  std::vector<uint8_t> reached;
  std::vector<uint8_t> graph_input_wanted;  // by graph input: whether its gradient is needed
  std::unordered_map<ValueId, std::vector<WeightGradTerm>> products;  // by weight: its terms
  // Set if the user wrote, after capture, to a tensor that the ops read. Otherwise null.
  std::unique_ptr<Written> written;
  bool any_kept = false;              // whether a graph input's old content is kept (overwrites.h)
  std::vector<UnseenWrite> unseen;    // writes that precede this pass; sorted by base
  std::unique_ptr<Recompute> replay;  // only with create_graph or for a transform
  // By level: number of FlushRecord::feeders that have not yet run in this pass.
  std::vector<uint32_t> feeders_left;
  bool reopened = false;  // whether a level was made ready to run again
  // Batches whose backward has run and whose values are not yet released.
  std::vector<uint32_t> finished;
  const Partition* partition = nullptr;  // the tiles in a subgraph; otherwise null
  // In a subgraph, by base. Bit t is set if nothing has been written to tile t yet.
  std::vector<uint64_t> unwritten;
};

// The state that a flush keeps until no backward can reach it.
struct FlushRecord {
  Tape tape;
  Store store;
  std::shared_ptr<void> tables;  // owns the geometries and signatures that the tape refers to
  std::vector<NodeId> order;     // live nodes, batch after batch
  std::vector<BatchRecord> batches;
  std::shared_ptr<Trace> trace;  // the trace of the scope; null unless tracing is on
  // In an open record, by node that ran: the length of the longest chain of ops up to the node
  // (Report::depth).
  std::vector<uint32_t> depths;

  std::vector<HeldValue> held;
  // The autograd nodes that send gradients to a level and to the levels below this level. The node
  // of a held value is stored with the value's level. An ExitNode is stored with the level below
  // its own level. Nodes are compared by address only, because a node may already be destroyed.
  std::vector<std::pair<const void*, uint32_t>> feeders;
  HeldMemories memories;
  // By value: whether the value is in `held` and its autograd node receives its gradient. Empty if
  // no held value is read again.
  std::vector<uint8_t> is_held;
  std::vector<uint32_t> value_level;  // by result: its level; empty if no held value is read again
  // By node: whether its backward runs in two halves (Level::Half). Empty if no node is divided.
  std::vector<uint8_t> is_divided;
  std::vector<NodeId> level_order;  // the nodes of `order`, sorted by level
  std::vector<Level> levels;
  std::vector<LevelExport> exports;                     // the exports of all levels
  GeometryTable element_map_geometries;                 // geometries that only element_map() uses
  std::unordered_map<uint64_t, uint32_t> export_index;  // export_key -> index in `exports`

  std::mutex mutex;
  // By node: whether its backward has run without retain_graph (consumed_nodes.h).
  std::vector<uint8_t> consumed;
  size_t num_unconsumed = 0;
  // By shared node (Node::is_shared): the nodes from which it gets gradients.
  std::unordered_map<NodeId, std::vector<NodeId>> readers_of_shared;
  bool freed = false;     // whether the values are released; sizes and dtypes remain
  bool verified = false;  // whether recomputed values are compared with the original values
  // The states of the backward passes that are in progress, by the id of autograd's graph task.
  std::unordered_map<int, std::unique_ptr<BackwardTask>> tasks;

  // Returns the held value whose autograd node receives the gradient of `id`, or kNone. This is the
  // nearest held value on the chain of views from `id` to its base.
  ValueId cut(ValueId id) const;
  bool divided(NodeId node) const { return !is_divided.empty() && is_divided[node] != 0; }
  // Returns the place of the gradient of `id` within the gradient of `cut`. `id` is `cut` or a view
  // of `cut`. Elements of `cut` may share memory, but their gradients do not.
  ElementMap element_map(ValueId id, ValueId cut);
  // Whether the memory that contains the value `id` still exists.
  bool has_values(ValueId id) const;
  void free_saved();
  void free_slab(uint32_t number);
};

// Raises eager's error for a second backward without retain_graph.
[[noreturn]] void raise_consumed(const std::string& op);

}  // namespace autobatch

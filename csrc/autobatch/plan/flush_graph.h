// The nodes that a flush runs, with all data that scheduling, member ordering and memory planning
// need. Scheduling and planning visit nodes in schedule order, but the tape has nodes and values in
// capture order. Therefore a single pass copies the data into contiguous arrays. The nodes are
// numbered without gaps, in capture order. While the FlushGraph exists, Node::number is this
// number.
#pragma once

#include "autobatch/common/pooled_memory.h"
#include "autobatch/report.h"
#include "autobatch/rules/flush_record.h"
#include "autobatch/schedule.h"

#include <algorithm>
#include <span>
#include <vector>

namespace autobatch {

class FlushGraph {
 public:
  // One operand that is a result of another node of the graph. For reads(number)[i], the other node
  // is producers(number)[i]. A Read is packed into 32 bits, because there are many Reads.
  class Read {
   public:
    Read(uint32_t result, uint32_t slot) : word_(result << 8 | std::min(slot, kLastSlot)) {}
    uint32_t result() const { return word_ >> 8; }
    uint32_t slot() const { return word_ & kLastSlot; }  // operand slot of the reader

   private:
    static constexpr uint32_t kLastSlot = 255;  // represents slot 255 and all later slots
    uint32_t word_;
  };
  // An operand that was computed by an earlier flush of the same record.
  struct EarlierRead {
    uint32_t reader = 0;
    ValueId base = kNone;
    uint32_t slot = 0;
  };
  // The properties that all nodes of one signature have in common.
  struct Kind {
    Signature* signature = nullptr;
    uint32_t num_results = 0;
    uint32_t first_extent = 0;  // index in extents_ of the first extent of one node
    bool is_uniform = true;     // whether, for each k, result k has the same extent in all nodes
    bool needs_grad = false;    // whether a result of any node requires grad
  };

  FlushGraph() = default;
  ~FlushGraph() { forget(); }
  FlushGraph(const FlushGraph&) = delete;
  FlushGraph& operator=(const FlushGraph&) = delete;

  // Builds the graph of the nodes in `nodes` (in capture order) on which `results` depend. If
  // `results` is null, takes all of `nodes` whose state is not kGone. May be called again after
  // operands of nodes have changed. Sets Signature::local while the graph exists.
  void build(Tape& tape, at::ArrayRef<NodeId> nodes, const std::vector<ValueId>* results);

  // Merges the node `merged` into the node `reader`, which reads the result of `merged`. The
  // operands of `merged` replace this result among the operands of `reader`. No other operand may
  // read the result.
  struct Merge {
    uint32_t reader, merged;
    Signature* signature;  // new signature of the reader
    uint32_t first_slot;   // slot of the first operand of `merged` among the reader's new operands
  };
  // Applies the merges and removes the merged nodes from the graph. `merges` is sorted by reader.
  // Apart from results of merged nodes, a reader must not read results of nodes of the graph.
  void merge(std::span<const Merge> merges);

  uint32_t size() const { return size_; }
  NodeId id(uint32_t number) const { return nodes_[number].id; }
  // Returns the number of a node, or kNone if the node is not in the graph.
  uint32_t number(NodeId id) const { return tape_->nodes[id].number; }
  const std::vector<Kind>& kinds() const { return kinds_; }
  uint32_t signature(uint32_t number) const { return signature_[number]; }
  const Kind& kind(uint32_t number) const { return kinds_[signature_[number]]; }
  std::span<const uint32_t> producers(uint32_t number) const {
    return {inputs_ + input_begin_[number], inputs_ + input_begin_[number + 1]};
  }
  const Read* reads(uint32_t number) const { return &reads_[input_begin_[number]]; }
  std::span<const EarlierRead> earlier() const { return earlier_; }
  ValueId first_value(uint32_t number) const { return nodes_[number].first_value; }
  // Returns the extent of result k, in elements.
  int64_t extent(uint32_t number, uint32_t k) const {
    return extents_[nodes_[number].first_extent + k];
  }

  // Whether, for each k, result k has the same extent in all of `members`, which are the members of
  // one batch.
  bool is_even(std::span<const uint32_t> members) const {
    return kind(members.front()).is_uniform &&
           signature(members.front()) == signature(members.back());
  }

  // Returns the graph in the form that the scheduler reads. The returned view is valid until
  // build() or merge() is called.
  ScheduleInput view() const;
  // Returns the data of view(), and moves the ownership of its memory from the graph to the caller.
  BoundInput take_bound_input();

  // --- the schedule; valid after set_order() ---

  // Sets the schedule's order, as node numbers. The first node of `order` has position `start` in
  // FlushRecord::order.
  void set_order(std::vector<uint32_t> order, uint32_t start) {
    order_ = std::move(order);
    start_ = start;
  }
  // Returns the numbers of the batch's members.
  std::span<uint32_t> members(const BatchRecord& batch) {
    return std::span(order_).subspan(batch.first - start_, batch.count);
  }
  std::span<const uint32_t> members(const BatchRecord& batch) const {
    return std::span(order_).subspan(batch.first - start_, batch.count);
  }
  uint32_t member_at(uint32_t place) const { return order_[place - start_]; }
  NodeId at(uint32_t place) const { return nodes_[member_at(place)].id; }
  void append_order(std::vector<NodeId>& order) const;

 private:
  struct OfNode {
    NodeId id;
    ValueId first_value;
    uint32_t first_extent;
  };

  void choose(at::ArrayRef<NodeId> nodes, const std::vector<ValueId>* results);
  void make_room(at::ArrayRef<NodeId> nodes);
  void add(NodeId id);
  void add_kind(Signature* signature, uint32_t num_results);
  void finish();
  void sort_kinds(std::span<const uint32_t> rank);
  void describe_kinds();
  void make_list_room(uint32_t nodes, size_t inputs);
  uint32_t number_of(Signature* signature, const Kind& like);
  void merge_earlier(std::span<const Merge> merges, const uint32_t* merge_of);
  void forget_kinds();
  void forget();

  Tape* tape_ = nullptr;
  // The arrays are filled from the last node to the first: when a node is reached, it is already
  // known whether the node is needed. The arrays have room for all nodes given to build(). Needed
  // nodes fill the end of the arrays; the gap_ entries before the needed nodes stay unused.
  PooledArray<uint32_t> policy_memory_;  // the memory of signature_, input_begin_ and inputs_
  PooledArray<OfNode> node_memory_;
  PooledArray<Read> read_memory_;
  PooledArray<int64_t> extents_;  // the extent of each result, in elements
  uint32_t gap_ = 0, size_ = 0;
  uint32_t first_extent_ = 0;
  // The next three arrays are indexed by node number.
  uint32_t* signature_ = nullptr;    // indices in kinds_
  uint32_t* input_begin_ = nullptr;  // [nodes + 1], indices in inputs_ and reads_
  OfNode* nodes_ = nullptr;
  uint32_t* inputs_ = nullptr;  // node numbers of the producers
  Read* reads_ = nullptr;
  std::vector<EarlierRead> earlier_;  // sorted by reader
  std::vector<Kind> kinds_;
  std::vector<uint8_t> batchable_, heavy_;  // indexed by kind
  uint64_t family_ = 0;
  std::vector<uint32_t> order_;
  uint32_t start_ = 0;
};

}  // namespace autobatch

// The nodes that a flush runs, and what its schedule, the order of members and places in memory ask
// of them. Those meet nodes in the order of the schedule, in which nodes and values lie far apart
// in the tape: so one pass over them writes all of it side by side. Nodes are numbered among
// themselves, in the order of capture; while the graph lives they know their numbers.
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
  // A node reads the result of another, which is producers(number)[i]. In a word, for there are
  // many.
  class Read {
   public:
    Read(uint32_t result, uint32_t slot) : word_(result << 8 | std::min(slot, kLastSlot)) {}
    uint32_t result() const { return word_ >> 8; }
    uint32_t slot() const { return word_ & kLastSlot; }  // of the reader's operands

   private:
    static constexpr uint32_t kLastSlot = 255;  // stands for all from there on
    uint32_t word_;
  };
  // Of a result that was computed before.
  struct EarlierRead {
    uint32_t reader = 0;
    ValueId base = kNone;
    uint32_t slot = 0;
  };
  // What all nodes of one signature have in common.
  struct Kind {
    Signature* signature = nullptr;
    uint32_t num_results = 0;
    uint32_t first_extent = 0;  // of one node
    bool is_uniform = true;     // results are as long in all nodes
    bool needs_grad = false;    // of any node
  };

  FlushGraph() = default;
  ~FlushGraph() { forget(); }
  FlushGraph(const FlushGraph&) = delete;
  FlushGraph& operator=(const FlushGraph&) = delete;

  // Of those of the nodes, which come in order, on which these results depend; null: of all that
  // are not gone. Once it was built it is built anew, for nodes that have other operands by now.
  // Signatures are numbered while it lives.
  void build(Tape& tape, at::ArrayRef<NodeId> nodes, const std::vector<ValueId>* results);

  // A node that reads what another read, in place of its result, which nobody else reads.
  struct Merge {
    uint32_t reader, merged;
    Signature* signature;  // the reader's from now on
    uint32_t first_slot;   // that the first of the other's operands is in
  };
  // What was merged is not in the graph any more. By readers in order, each read one result.
  void merge(std::span<const Merge> merges);

  uint32_t size() const { return size_; }
  NodeId id(uint32_t number) const { return nodes_[number].id; }
  // Among these; kNone if it is not.
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
  // Of result k.
  int64_t extent(uint32_t number, uint32_t k) const {
    return extents_[nodes_[number].first_extent + k];
  }

  // Whether results are as long in all of these members of a batch.
  bool is_even(std::span<const uint32_t> members) const {
    return kind(members.front()).is_uniform &&
           signature(members.front()) == signature(members.back());
  }

  ScheduleInput view() const;
  BoundInput take_bound_input();

  // --- the schedule, once there is one ---

  // Its first node stands at `start` in the record's order.
  void set_order(std::vector<uint32_t> order, uint32_t start) {
    order_ = std::move(order);
    start_ = start;
  }
  // By their numbers.
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
  // It is built from the last node to the first: so it is known of each whether it is needed. These
  // have room for all of the nodes, and those that are needed come to stand at their end, behind a
  // gap.
  PooledArray<uint32_t> policy_memory_;  // signatures, where operands begin, producers
  PooledArray<OfNode> node_memory_;
  PooledArray<Read> read_memory_;
  PooledArray<int64_t> extents_;  // of results
  uint32_t gap_ = 0, size_ = 0;
  uint32_t first_extent_ = 0;
  // By number.
  uint32_t* signature_ = nullptr;    // into kinds_
  uint32_t* input_begin_ = nullptr;  // [nodes + 1] into inputs_ and reads_
  OfNode* nodes_ = nullptr;
  uint32_t* inputs_ = nullptr;  // producers
  Read* reads_ = nullptr;
  std::vector<EarlierRead> earlier_;  // readers in order
  std::vector<Kind> kinds_;
  std::vector<uint8_t> batchable_, heavy_;  // by kind
  uint64_t family_ = 0;
  std::vector<uint32_t> order_;
  uint32_t start_ = 0;
};

}  // namespace autobatch

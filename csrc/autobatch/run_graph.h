// The nodes that a flush runs, and what its schedule, the order of members and places in memory ask
// of them. Those meet nodes in the order of the schedule, in which nodes and values lie far apart
// in the tape: so one pass over the tape writes all of it side by side. Nodes are numbered among
// themselves, in the order of capture.
#pragma once

#include "autobatch/backward.h"
#include "autobatch/report.h"
#include "autobatch/schedule.h"

#include <memory>
#include <span>
#include <vector>

namespace autobatch {

class RunGraph {
 public:
  // A node reads the result of another, which is producers(number)[i]. In a word, for there are
  // many.
  struct Read {
    uint32_t result : 24;
    uint32_t slot : 8;  // of the reader's operands; the last stands for all from there on
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
    uint32_t first_extent = 0;  // of its first node
    bool is_uniform = true;     // results are as long in all nodes
    bool needs_grad = false;    // of any node
  };

  // By node of the tape: whether it is run; kChanged: its signature and operands are others by now.
  enum Runs : uint8_t { kNot, kRuns, kChanged };

  // Signatures are numbered while this lives.
  RunGraph(const Tape& tape, const std::vector<uint8_t>& runs);
  ~RunGraph() { forget_kinds(); }
  RunGraph(const RunGraph&) = delete;
  RunGraph& operator=(const RunGraph&) = delete;

  // Takes out of `runs` what none of these results depends on; false if there is nothing.
  bool find_dead(const Tape& tape, std::span<const ValueId> results,
                 std::vector<uint8_t>& runs) const;
  // What is not run goes, and what has changed is read again.
  void update(const Tape& tape, const std::vector<uint8_t>& runs);

  uint32_t size() const { return static_cast<uint32_t>(signature_.size()); }
  NodeId id(uint32_t number) const { return nodes_[number].id; }
  // Among these; kNone if it is not.
  uint32_t number(NodeId id) const { return number_[id]; }
  const std::vector<Kind>& kinds() const { return kinds_; }
  uint32_t signature(uint32_t number) const { return signature_[number]; }
  const Kind& kind(uint32_t number) const { return kinds_[signature_[number]]; }
  std::span<const uint32_t> producers(uint32_t number) const {
    return {inputs_.data() + input_begin_[number], inputs_.data() + input_begin_[number + 1]};
  }
  const Read* reads(uint32_t number) const { return &reads_[input_begin_[number]]; }
  std::span<const EarlierRead> earlier() const { return earlier_; }
  ValueId first_value(uint32_t number) const { return nodes_[number].first_value; }
  // Of result k.
  int64_t extent(uint32_t number, uint32_t k) const {
    return extents_[nodes_[number].first_extent + k];
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
  NodeId at(uint32_t place) const { return nodes_[order_[place - start_]].id; }
  void append_order(std::vector<NodeId>& order) const;

 private:
  struct OfNode {
    NodeId id;
    ValueId first_value;
    uint32_t first_extent;
  };

  // Where the next node is written. Of update(): behind what is read.
  struct Ends {
    uint32_t node = 0, input = 0, extent = 0;
  };

  void end_at(const Ends& ends);
  Kind& begin(NodeId id, ValueId first_value, Signature* signature, uint32_t num_results,
              Ends& ends);
  void add_kind(Signature* signature, uint32_t num_results, uint32_t first_extent);
  void add(const Tape& tape, NodeId id, Ends& ends);
  void move(uint32_t from, const Kind& before, Ends& ends);
  void forget_kinds();

  static constexpr uint32_t kLastSlot = 255;

  std::vector<uint32_t> number_;  // by node of the tape
  std::unique_ptr<OfNode[]> nodes_;
  std::vector<uint32_t> signature_;    // by number: into kinds_
  std::vector<uint32_t> input_begin_;  // [nodes + 1] into inputs_ and reads_
  std::vector<uint32_t> inputs_;       // producers
  std::unique_ptr<Read[]> reads_;
  std::vector<EarlierRead> earlier_;    // readers in order
  std::unique_ptr<int64_t[]> extents_;  // of results
  std::vector<Kind> kinds_;
  std::vector<uint8_t> batchable_, heavy_;  // by kind
  uint64_t family_ = 0;
  std::vector<uint32_t> order_;
  uint32_t start_ = 0;
};

}  // namespace autobatch

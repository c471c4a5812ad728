// What schedule, order and placement ask of a flush's nodes, side by side in memory: they meet them
// in the order of the schedule, in which nodes and values lie far apart.
#pragma once

#include "autobatch/graph.h"

#include <span>
#include <vector>

namespace autobatch {

// A node reads the result of another.
struct Read {
  NodeId node = kNone;  // whose result it is
  uint32_t result = 0;
  uint32_t slot = 0;  // of the reader's operands
};

class Reads {
 public:
  // `count`: the nodes that are run.
  Reads(const Tape& tape, size_t count) : number_(tape.nodes.size(), kNone) {
    nodes_.reserve(count + 1);
    reads_.reserve(2 * count);
    extents_.reserve(count);
  }

  // In their order, and after each its reads.
  void add_node(const Tape& tape, NodeId id) {
    const Node& node = tape.nodes[id];
    number_[id] = static_cast<uint32_t>(nodes_.size());
    begin_node(node.first_value);
    for (uint32_t k = 0; k < node.num_values; ++k) {
      extents_.push_back(tape.values[node.first_value + k].geometry->extent);
    }
  }
  void add_read(const Read& read) { reads_.push_back(read); }
  void finish() { begin_node(kNone); }

  // Among those that are run; kNone if it is not.
  uint32_t number(NodeId node) const { return number_[node]; }
  std::span<const Read> of(NodeId node) const {
    const OfNode* at = &nodes_[number_[node]];
    return {reads_.data() + at[0].first_read, reads_.data() + at[1].first_read};
  }
  ValueId first_value(NodeId node) const { return nodes_[number_[node]].first_value; }
  // Of result k.
  int64_t extent(NodeId node, uint32_t k) const {
    return extents_[nodes_[number_[node]].first_extent + k];
  }

 private:
  struct OfNode {
    uint32_t first_read, first_extent;
    ValueId first_value;
  };

  void begin_node(ValueId first_value) {
    nodes_.push_back({static_cast<uint32_t>(reads_.size()), static_cast<uint32_t>(extents_.size()),
                      first_value});
  }

  std::vector<uint32_t> number_;  // by node
  std::vector<OfNode> nodes_;     // those that are run, and one more
  std::vector<Read> reads_;
  std::vector<int64_t> extents_;  // of results
};

}  // namespace autobatch

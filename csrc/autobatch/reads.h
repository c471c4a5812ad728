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
  explicit Reads(const Tape& tape) {
    nodes_.reserve(tape.nodes.size() + 1);
    reads_.reserve(tape.operands.size());
    extents_.resize(tape.values.size());
  }

  // Nodes are added in order; their reads after each.
  void add_node(const Tape& tape, const Node& node) {
    nodes_.push_back({static_cast<uint32_t>(reads_.size()), node.first_value});
    for (ValueId id = node.first_value; id < node.first_value + node.num_values; ++id) {
      extents_[id] = tape.values[id].geometry->extent;
    }
  }
  // One that is not run now.
  void skip_node(const Node& node) {
    nodes_.push_back({static_cast<uint32_t>(reads_.size()), node.first_value});
  }
  void add_read(const Read& read) { reads_.push_back(read); }
  void finish() { nodes_.push_back({static_cast<uint32_t>(reads_.size()), kNone}); }

  std::span<const Read> of(NodeId node) const {
    const uint32_t begin = nodes_[node].first_read;
    return std::span(reads_).subspan(begin, nodes_[node + 1].first_read - begin);
  }
  ValueId first_value(NodeId node) const { return nodes_[node].first_value; }
  // Of a result of a node that is run.
  int64_t extent(ValueId result) const { return extents_[result]; }

 private:
  struct OfNode {
    uint32_t first_read;
    ValueId first_value;
  };
  std::vector<OfNode> nodes_;  // by node, and one more
  std::vector<Read> reads_;
  std::vector<int64_t> extents_;  // by value
};

}  // namespace autobatch

// Properties of a graph that several scheduling policies need.
#pragma once

#include "autobatch/schedule.h"

#include <array>
#include <vector>

namespace autobatch {

// Returns for each node the length of the longest path from a node without producers to this node.
std::vector<uint32_t> node_depths(const ScheduleInput& graph);

struct Consumers {
  std::vector<uint32_t> begin;  // [nodes + 2] offsets into `node`
  std::vector<uint32_t> node;   // consumer of each edge; ascending for each producer

  std::span<const uint32_t> of(uint32_t producer) const {
    return std::span(node).subspan(begin[producer], begin[producer + 1] - begin[producer]);
  }
};
Consumers find_consumers(const ScheduleInput& graph);

// Returns the batchable signatures that may have two nodes on one path. No other batchable
// signature has two nodes on one path.
std::vector<uint32_t> find_repeated(const ScheduleInput& graph);

// Number of signatures whose nodes are counted in one walk over the graph. The number is large
// enough to share reads of the edges, and small enough that the counts of 40,000 nodes stay in the
// cache.
constexpr size_t kBlock = 8;
using Counts = std::array<uint32_t, kBlock>;  // one count per signature of the block

// Returns a schedule that ED-Batch's heuristic finds. The heuristic walks over the graph from the
// sinks or from the sources.
enum class FrontierStart : uint8_t { kSinks, kSources };
Schedule frontier_schedule(const ScheduleInput& graph, FrontierStart start);

}  // namespace autobatch

// What several scheduling policies compute of a graph.
#pragma once

#include "autobatch/schedule.h"

#include <array>
#include <memory>
#include <vector>

namespace autobatch {

// For each node the length of the longest path from a node without producers.
std::vector<uint32_t> node_depths(const ScheduleInput& graph);

struct Consumers {
  std::vector<uint32_t> begin;  // [nodes + 2] offsets into node
  std::vector<uint32_t> node;   // ascending for each producer, one entry an edge

  std::span<const uint32_t> of(uint32_t producer) const {
    return std::span(node).subspan(begin[producer], begin[producer + 1] - begin[producer]);
  }
};
Consumers find_consumers(const ScheduleInput& graph);

// Batchable signatures that may have two nodes on one path; of the others no path has two.
std::vector<uint32_t> find_repeated(const ScheduleInput& graph);

// How many signatures walk the graph together: enough to share the reading of its edges, few enough
// that the counts of 40,000 nodes stay in the cache.
constexpr size_t kBlock = 8;
using Counts = std::array<uint32_t, kBlock>;  // by place in the block

// A schedule by ED-Batch's heuristic, walking from either end of the graph.
enum class FrontierStart : uint8_t { kSinks, kSources };
Schedule frontier_schedule(const ScheduleInput& graph, FrontierStart start);

std::unique_ptr<const Policy> make_agenda_policy();
std::unique_ptr<const Policy> make_depth_policy();
std::unique_ptr<const Policy> make_frontier_policy();
std::unique_ptr<const Policy> make_auto_policy();

}  // namespace autobatch

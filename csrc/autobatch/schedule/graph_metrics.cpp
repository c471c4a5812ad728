#include "autobatch/schedule/graph_metrics.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace autobatch {

std::vector<uint32_t> node_depths(const ScheduleInput& graph) {
  std::vector<uint32_t> depth(graph.num_nodes());
  for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (const uint32_t producer : graph.producers(node)) {
      depth[node] = std::max(depth[node], depth[producer] + 1);
    }
  }
  return depth;
}

Consumers find_consumers(const ScheduleInput& graph) {
  // At first, begin[p + 2] counts the consumers of node p. After the partial sums, begin[p + 1] is
  // the offset of p's list. Each consumer that is added to the list increments begin[p + 1]. At the
  // end, begin[p + 1] is the offset of the next list, and begin[p] is the offset of p's list.
  // Therefore the vector has one additional entry.
  Consumers consumers{std::vector<uint32_t>(graph.num_nodes() + 2),
                      std::vector<uint32_t>(graph.inputs.size())};
  for (const uint32_t producer : graph.inputs) ++consumers.begin[producer + 2];
  std::partial_sum(consumers.begin.begin(), consumers.begin.end(), consumers.begin.begin());
  for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (const uint32_t producer : graph.producers(node)) {
      consumers.node[consumers.begin[producer + 1]++] = node;
    }
  }
  return consumers;
}

std::vector<uint32_t> find_repeated(const ScheduleInput& graph) {
  struct Extent {
    uint32_t min = std::numeric_limits<uint32_t>::max();
    uint32_t max = 0;
  };
  const std::vector<uint32_t> depth = node_depths(graph);
  std::vector<Extent> extents(graph.num_signatures);
  for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
    Extent& extent = extents[graph.signature[node]];
    extent.min = std::min(extent.min, depth[node]);
    extent.max = std::max(extent.max, depth[node]);
  }
  std::vector<uint32_t> repeated;
  for (uint32_t signature = 0; signature < graph.num_signatures; ++signature) {
    // Depth grows along a path, so two nodes of equal depth are never on one path.
    if (graph.batchable[signature] && extents[signature].min < extents[signature].max) {
      repeated.push_back(signature);
    }
  }
  return repeated;
}

}  // namespace autobatch

#include "autobatch/schedule.h"
#include "autobatch/schedule/graph_metrics.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace autobatch {
namespace {

// lower bound -------------------------------------------------------------------------------------

// For each signature of the block, finds the largest number of nodes of the signature on one path.
// Returns the sum of these numbers. `on_path` is scratch space. For each node and signature, it
// holds the largest number of nodes of the signature on a path that ends at the node.
uint64_t longest_chains(const ScheduleInput& graph, std::span<const uint32_t> block,
                        std::vector<Counts>& on_path) {
  std::vector<uint32_t> place(graph.num_signatures, kBlock);
  for (uint32_t i = 0; i < block.size(); ++i) place[block[i]] = i;
  Counts longest{};
  for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
    Counts most{};
    for (const uint32_t producer : graph.producers(node)) {
      for (size_t i = 0; i < kBlock; ++i) most[i] = std::max(most[i], on_path[producer][i]);
    }
    if (const uint32_t i = place[graph.signature[node]]; i < kBlock) {
      longest[i] = std::max(longest[i], ++most[i]);
    }
    on_path[node] = most;
  }
  return std::accumulate(longest.begin(), longest.end(), uint64_t{0});
}

// validate ----------------------------------------------------------------------------------------

// Throws if `holds` is false. The message is the concatenation of the parts.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::logic_error(message.str());
}

void validate_graph(const ScheduleInput& graph) {
  const uint32_t nodes = graph.num_nodes();
  require(graph.batchable.size() == graph.num_signatures, "batchable has ", graph.batchable.size(),
          " entries for ", graph.num_signatures, " signatures");
  require(graph.heavy.size() == graph.num_signatures, "heavy has ", graph.heavy.size(),
          " entries for ", graph.num_signatures, " signatures");
  require(graph.input_begin.size() == size_t{nodes} + 1, "input_begin has ",
          graph.input_begin.size(), " entries for ", nodes, " nodes");
  require(graph.input_begin.front() == 0 && graph.input_begin.back() == graph.inputs.size() &&
              std::is_sorted(graph.input_begin.begin(), graph.input_begin.end()),
          "input_begin does not divide the ", graph.inputs.size(), " inputs among the nodes");
  for (uint32_t node = 0; node < nodes; ++node) {
    require(graph.signature[node] < graph.num_signatures, "node ", node, " has signature ",
            graph.signature[node], " of ", graph.num_signatures);
    for (const uint32_t producer : graph.producers(node)) {
      require(producer < node, "node ", node, " reads node ", producer,
              ", which was not captured before it");
    }
  }
}

// Returns for each node the number of the batch that runs the node. Throws if a node does not run
// exactly once.
std::vector<size_t> batch_of_each_node(const ScheduleInput& graph, const Schedule& schedule) {
  const std::vector<uint32_t>& begin = schedule.batch_begin;
  require(!begin.empty() && begin.front() == 0 && begin.back() == schedule.order.size() &&
              std::is_sorted(begin.begin(), begin.end(), std::less_equal<>()),
          "batch_begin does not divide the ", schedule.order.size(),
          " scheduled nodes into batches of at least one");
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  std::vector<size_t> batch_of(graph.num_nodes(), kNone);
  for (size_t b = 0; b < schedule.num_batches(); ++b) {
    for (const uint32_t node : schedule.batch(b)) {
      require(node < graph.num_nodes(), "batch ", b, " runs node ", node, " of ",
              graph.num_nodes());
      require(batch_of[node] == kNone, "node ", node, " runs twice, in batches ", batch_of[node],
              " and ", b);
      batch_of[node] = b;
    }
  }
  for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
    require(batch_of[node] != kNone, "node ", node, " never runs");
  }
  return batch_of;
}

}  // namespace

uint64_t lower_bound(const ScheduleInput& graph) {
  std::vector<uint32_t> count(graph.num_signatures);
  for (const uint32_t signature : graph.signature) ++count[signature];
  const std::vector<uint32_t> repeated = find_repeated(graph);
  uint64_t bound = 0;
  for (uint32_t signature = 0; signature < graph.num_signatures; ++signature) {
    bound += graph.batchable[signature] ? std::min(count[signature], 1U) : count[signature];
  }
  bound -= repeated.size();
  std::vector<Counts> on_path(repeated.empty() ? 0 : graph.num_nodes());
  for (size_t i = 0; i < repeated.size(); i += kBlock) {
    const size_t size = std::min(kBlock, repeated.size() - i);
    bound += longest_chains(graph, std::span(repeated).subspan(i, size), on_path);
  }
  return bound;
}

void validate(const ScheduleInput& graph, const Schedule& schedule) {
  validate_graph(graph);
  const std::vector<size_t> batch_of = batch_of_each_node(graph, schedule);
  for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (const uint32_t producer : graph.producers(node)) {
      require(batch_of[producer] < batch_of[node], "node ", node, " in batch ", batch_of[node],
              " reads node ", producer, ", which runs in batch ", batch_of[producer]);
    }
  }
  for (size_t b = 0; b < schedule.num_batches(); ++b) {
    const std::span<const uint32_t> members = schedule.batch(b);
    const uint32_t signature = graph.signature[members[0]];
    for (const uint32_t node : members) {
      require(graph.signature[node] == signature, "batch ", b, " runs node ", members[0],
              " of signature ", signature, " with node ", node, " of signature ",
              graph.signature[node]);
    }
    require(members.size() == 1 || graph.batchable[signature], "batch ", b, " runs ",
            members.size(), " nodes of signature ", signature, ", which is not batchable");
  }
}

}  // namespace autobatch

#include "autobatch/schedule/policies.h"

#include "autobatch/schedule/graph_metrics.h"

#include <numeric>
#include <span>
#include <stdexcept>
#include <string>

namespace autobatch {
namespace {

// Returns the nodes of `order`, sorted by key[node]. The sort is stable.
std::vector<uint32_t> stable_sort_by(std::span<const uint32_t> key, uint32_t num_keys,
                                     std::span<const uint32_t> order) {
  std::vector<uint32_t> next(num_keys + 1);
  for (const uint32_t k : key) ++next[k + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<uint32_t> sorted(order.size());
  for (const uint32_t node : order) sorted[next[key[node]]++] = node;
  return sorted;
}

// Runs the nodes depth by depth. Nodes of one signature run in different batches if they have
// different depths. DyNet's paper (policy_agenda.cpp) and TensorFlow Fold use this policy as a
// baseline.
class DepthPolicy final : public Policy {
 public:
  std::string_view name() const override { return "depth"; }

  Schedule schedule(const ScheduleInput& graph) const override {
    const uint32_t nodes = graph.num_nodes();
    const std::vector<uint32_t> depth = node_depths(graph);
    Schedule result;
    result.order.resize(nodes);
    std::iota(result.order.begin(), result.order.end(), 0);
    result.order = stable_sort_by(graph.signature, graph.num_signatures, result.order);
    result.order = stable_sort_by(depth, nodes, result.order);
    uint32_t previous = 0;
    for (uint32_t i = 0; i < nodes; ++i) {
      const uint32_t node = result.order[i];
      const uint32_t signature = graph.signature[node];
      const bool joins = i > 0 && graph.batchable[signature] &&
                         signature == graph.signature[previous] && depth[node] == depth[previous];
      if (!joins) result.batch_begin.push_back(i);
      previous = node;
    }
    result.batch_begin.push_back(nodes);
    return result;
  }
};

// To add a policy, add a line here. Write the class of the policy above this function, or in a
// separate file if the class is long.
std::span<const std::unique_ptr<const Policy>> policies() {
  static const std::unique_ptr<const Policy> table[] = {
      make_auto_policy(),
      make_agenda_policy(),
      std::make_unique<DepthPolicy>(),
      make_frontier_policy(),
  };
  return table;
}

}  // namespace

Policy::~Policy() = default;

const Policy& find_policy(std::string_view name) {
  for (const auto& policy : policies()) {
    if (policy->name() == name) return *policy;
  }
  std::string message = "unknown batching policy '" + std::string(name) + "', expected one of";
  std::string_view separator = ": ";
  for (const std::string_view valid : policy_names()) {
    message.append(separator).append("'").append(valid).append("'");
    separator = ", ";
  }
  throw std::invalid_argument(message);
}

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names;
  for (const auto& policy : policies()) names.push_back(policy->name());
  return names;
}

}  // namespace autobatch

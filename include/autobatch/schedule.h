// Scheduling decides which nodes of a graph run together, and in which order.
//
// A schedule is a pure function of the graph's structure. The scheduler does not depend on ops or
// on torch. So policies can be tested on graphs that are written by hand.
#pragma once

#include "autobatch/export.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace autobatch {

// One captured graph. Nodes are numbered in capture order, so every producer has a smaller number
// than its consumers. Policies do not check the numbering; validate() checks it.
struct ScheduleInput {
  std::span<const uint32_t> signature;    // [nodes] dense ids, < num_signatures
  std::span<const uint32_t> input_begin;  // [nodes + 1] offsets into inputs (CSR)
  std::span<const uint32_t> inputs;       // producer node ids (duplicates allowed)
  uint32_t num_signatures = 0;
  std::span<const uint8_t> batchable;  // [num_signatures]; 0: each node runs alone
  std::span<const uint8_t> heavy;      // [num_signatures]; 1: expensive (matmul), last in a tie
  // Id of the set of signatures. The id does not depend on the numbering of the signatures. Graphs
  // with the same id most likely come from the same model. So a choice that is good for one graph
  // is most likely good for the next graph with the same id. 0: unknown.
  uint64_t family = 0;

  uint32_t num_nodes() const { return static_cast<uint32_t>(signature.size()); }
  std::span<const uint32_t> producers(uint32_t node) const {
    return inputs.subspan(input_begin[node], input_begin[node + 1] - input_begin[node]);
  }
};

// A schedule of a graph. The nodes of batch b are order[batch_begin[b]], ..., order[batch_begin[b +
// 1] - 1], in capture order.
struct Schedule {
  std::vector<uint32_t> order;        // node ids in execution order
  std::vector<uint32_t> batch_begin;  // [batches + 1] offsets into order
  bool reaches_bound = false;         // whether num_batches() is known to be minimal

  size_t num_batches() const { return batch_begin.empty() ? 0 : batch_begin.size() - 1; }
  std::span<const uint32_t> batch(size_t b) const {
    return std::span(order).subspan(batch_begin[b], batch_begin[b + 1] - batch_begin[b]);
  }
};

// A batching policy. A policy has no state, so all threads use the same instance.
class AUTOBATCH_API Policy {
 public:
  virtual ~Policy();
  virtual std::string_view name() const = 0;
  // Returns a schedule that runs each node of the graph once.
  virtual Schedule schedule(const ScheduleInput& graph) const = 0;
};

// Returns the policy with this name. If there is no such policy, throws std::invalid_argument. The
// message contains the given name and all valid names.
AUTOBATCH_API const Policy& find_policy(std::string_view name);

// Returns the names of all policies; "auto" is the default. The user guide describes the policies.
AUTOBATCH_API std::vector<std::string_view> policy_names();

// Returns a lower bound on the number of batches. If a signature cannot be batched, the bound
// counts each of its nodes. If a signature can be batched, the bound counts the largest number of
// its nodes on one path.
AUTOBATCH_API uint64_t lower_bound(const ScheduleInput& graph);

// Throws std::logic_error if the graph or its schedule is invalid. The message describes the error.
// In a valid schedule, each node runs once, after its producers. All nodes of a batch have the same
// signature. If a signature cannot be batched, each of its batches has one node.
AUTOBATCH_API void validate(const ScheduleInput& graph, const Schedule& schedule);

}  // namespace autobatch

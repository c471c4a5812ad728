// The scheduling stage, graph -> schedule: which nodes run together, and in which order.
//
// A pure function of the graph's shape: nothing here knows what an operation is or includes torch,
// so policies are tested on graphs written by hand.
#pragma once

#include "autobatch/export.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace autobatch {

// One captured graph as the scheduler sees it. Nodes are numbered in capture order, so every
// producer has a smaller number than its consumers. Policies rely on what is said here without
// checking it; validate() checks it.
struct ScheduleInput {
  std::span<const uint32_t> signature;    // [nodes] dense type id, < num_signatures
  std::span<const uint32_t> input_begin;  // [nodes + 1] offsets into inputs (CSR)
  std::span<const uint32_t> inputs;       // producer node ids (duplicates allowed)
  uint32_t num_signatures = 0;
  std::span<const uint8_t> batchable;  // [num_signatures]; 0: each node of it runs alone
  std::span<const uint8_t> heavy;      // [num_signatures]; 1: matmul-like, yields ties to others
  // Graphs of one family have the same signatures, whatever their numbers: most likely they come
  // from one model, and what is good for one is good for the next. 0: not known.
  uint64_t family = 0;

  uint32_t num_nodes() const { return static_cast<uint32_t>(signature.size()); }
  std::span<const uint32_t> producers(uint32_t node) const {
    return inputs.subspan(input_begin[node], input_begin[node + 1] - input_begin[node]);
  }
};

// Batch b is order[batch_begin[b]] up to order[batch_begin[b + 1]], in capture order.
struct Schedule {
  std::vector<uint32_t> order;        // node ids in execution order
  std::vector<uint32_t> batch_begin;  // [batches + 1] offsets into order
  bool reaches_bound = false;         // no schedule has fewer batches; false if that is not known

  size_t num_batches() const { return batch_begin.empty() ? 0 : batch_begin.size() - 1; }
  std::span<const uint32_t> batch(size_t b) const {
    return std::span(order).subspan(batch_begin[b], batch_begin[b + 1] - batch_begin[b]);
  }
};

// Stateless: one instance serves every thread.
class AUTOBATCH_API Policy {
 public:
  virtual ~Policy();
  virtual std::string_view name() const = 0;
  virtual Schedule schedule(const ScheduleInput& graph) const = 0;
};

// Throws std::invalid_argument, naming the value received and the valid names.
AUTOBATCH_API const Policy& find_policy(std::string_view name);

// The first is the default.
AUTOBATCH_API std::vector<std::string_view> policy_names();

// No schedule has fewer batches: unbatchable nodes + for each other signature the largest number of
// its nodes on one path.
AUTOBATCH_API uint64_t lower_bound(const ScheduleInput& graph);

// Throws std::logic_error saying what is wrong with the graph or its schedule.
AUTOBATCH_API void validate(const ScheduleInput& graph, const Schedule& schedule);

}  // namespace autobatch

// Helpers for the tests of schedules.
#pragma once

#include "autobatch/schedule.h"

#include "catch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace autobatch {

using Nodes = std::vector<uint32_t>;

// A hand-written graph whose signatures are named by strings.
class ScheduleGraph {
 public:
  // Declares a signature. Must come before the first node of that signature.
  void declare(const std::string& name, bool batchable, bool heavy) {
    names_.push_back(name);
    batchable_.push_back(batchable);
    heavy_.push_back(heavy);
  }

  uint32_t add(const std::string& name, const Nodes& producers = {}) {
    auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) {
      declare(name, true, false);
      found = names_.end() - 1;
    }
    signature_.push_back(static_cast<uint32_t>(found - names_.begin()));
    inputs_.insert(inputs_.end(), producers.begin(), producers.end());
    input_begin_.push_back(static_cast<uint32_t>(inputs_.size()));
    return static_cast<uint32_t>(signature_.size() - 1);
  }

  // Adds `length` nodes, each of which reads the previous one. Returns the last node.
  uint32_t add_chain(const std::string& name, int length) {
    uint32_t last = add(name);
    for (int i = 1; i < length; ++i) last = add(name, {last});
    return last;
  }

  ScheduleInput view() const {
    return {.signature = signature_,
            .input_begin = input_begin_,
            .inputs = inputs_,
            .num_signatures = static_cast<uint32_t>(names_.size()),
            .batchable = batchable_,
            .heavy = heavy_};
  }

  const std::string& name_of(uint32_t node) const { return names_[signature_[node]]; }

 private:
  std::vector<std::string> names_;
  std::vector<uint8_t> batchable_;
  std::vector<uint8_t> heavy_;
  Nodes signature_;
  Nodes input_begin_ = {0};
  Nodes inputs_;
};

inline Schedule run(std::string_view policy, const ScheduleGraph& graph) {
  Schedule schedule = find_policy(policy).schedule(graph.view());
  validate(graph.view(), schedule);
  return schedule;
}

// Returns the batches in execution order as "<signature><size>", e.g. "leaf4 inner2 inner1".
inline std::string batches(std::string_view policy, const ScheduleGraph& graph) {
  const Schedule schedule = run(policy, graph);
  std::string result;
  for (size_t b = 0; b < schedule.num_batches(); ++b) {
    const std::span<const uint32_t> members = schedule.batch(b);
    if (b > 0) result += ' ';
    result += graph.name_of(members[0]) + std::to_string(members.size());
  }
  return result;
}

inline std::vector<Nodes> members(const Schedule& schedule) {
  std::vector<Nodes> result;
  for (size_t b = 0; b < schedule.num_batches(); ++b) {
    result.emplace_back(schedule.batch(b).begin(), schedule.batch(b).end());
  }
  return result;
}

}  // namespace autobatch

#include "autobatch/schedule/graph_metrics.h"
#include "autobatch/schedule/policies.h"
#include "autobatch/schedule/schedule_cache.h"

#include <bit>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace autobatch {
namespace {

enum class Candidate : uint8_t { kAgenda, kSinks, kSources, kDepth };  // sorted by increasing cost
constexpr Candidate kCandidates[] = {Candidate::kAgenda, Candidate::kSinks, Candidate::kSources,
                                     Candidate::kDepth};

Schedule schedule_by(Candidate candidate, const ScheduleInput& graph) {
  switch (candidate) {
    case Candidate::kAgenda:
      return find_policy("agenda").schedule(graph);
    case Candidate::kDepth:
      return find_policy("depth").schedule(graph);
    case Candidate::kSinks:
      return frontier_schedule(graph, FrontierStart::kSinks);
    case Candidate::kSources:
      return frontier_schedule(graph, FrontierStart::kSources);
  }
  return {};
}

// Returns the candidate with the fewest batches, and its schedule.
std::pair<Candidate, Schedule> find_best(const ScheduleInput& graph) {
  std::pair<Candidate, Schedule> best;
  for (const Candidate candidate : kCandidates) {
    Schedule schedule = schedule_by(candidate, graph);
    const bool reaches_bound = schedule.reaches_bound;
    if (candidate == kCandidates[0] || schedule.num_batches() < best.second.num_batches()) {
      best = {candidate, std::move(schedule)};
    }
    if (reaches_bound) break;
  }
  return best;
}

// Returns the schedule of a graph in which no two nodes have the same signature. For such a graph,
// all policies find the same batches.
Schedule one_by_one(uint32_t nodes) {
  Schedule schedule;
  schedule.reaches_bound = true;
  schedule.order.resize(nodes);
  schedule.batch_begin.resize(size_t{nodes} + 1);
  std::iota(schedule.order.begin(), schedule.order.end(), 0);
  std::iota(schedule.batch_begin.begin(), schedule.batch_begin.end(), 0);
  return schedule;
}

// The best candidate for each family of the most recent graphs (ScheduleInput::family).
class BestCandidates {
 public:
  static BestCandidates& get() {
    static auto* best = new BestCandidates();  // never destroyed: flushes may run at exit
    return *best;
  }

  // Returns the best candidate of the family, or null if the candidates must be compared. A few
  // graphs may differ from the other graphs of a family. Therefore the candidates are compared for
  // the 1st, 2nd, 4th, ... graph of a family and for every 64th graph.
  const Candidate* find(uint64_t family) {
    const std::lock_guard lock(mutex_);
    const auto found = families_.find(family);
    if (found == families_.end()) return nullptr;
    const uint32_t uses = ++found->second.uses;
    if (uses % 64 == 0 || std::has_single_bit(uses)) return nullptr;
    return &kCandidates[static_cast<size_t>(found->second.best)];
  }

  void note(uint64_t family, Candidate best) {
    const std::lock_guard lock(mutex_);
    if (families_.size() >= kMost) families_.clear();
    auto& entry = families_.try_emplace(family, Entry{best, 1}).first->second;
    entry.best = best;
  }

 private:
  struct Entry {
    Candidate best;
    uint32_t uses;
  };
  static constexpr size_t kMost = 4096;

  std::mutex mutex_;
  std::unordered_map<uint64_t, Entry> families_;
};

// Schedules a graph with the candidate that was best for earlier graphs of the same family.
class AutoPolicy final : public Policy {
 public:
  std::string_view name() const override { return "auto"; }

  Schedule schedule(const ScheduleInput& graph) const override {
    if (graph.num_nodes() == graph.num_signatures) return one_by_one(graph.num_nodes());
    if (graph.family == 0) return find_best(graph).second;
    return reuse_schedule(graph, [&] { return schedule_anew(graph); });
  }

 private:
  static Schedule schedule_anew(const ScheduleInput& graph) {
    const Candidate* known = BestCandidates::get().find(graph.family);
    if (known != nullptr) return schedule_by(*known, graph);
    auto [candidate, schedule] = find_best(graph);
    BestCandidates::get().note(graph.family, candidate);
    return std::move(schedule);
  }
};

}  // namespace

std::unique_ptr<const Policy> make_auto_policy() { return std::make_unique<AutoPolicy>(); }

}  // namespace autobatch

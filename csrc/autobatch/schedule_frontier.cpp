#include "autobatch/schedule_graph.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace autobatch {
namespace {

// The graph walked from its sinks (or its sources): what must have run before a node, what it
// releases.
class Walk {
 public:
  Walk(const ScheduleInput& graph, const Consumers& consumers, bool from_sinks)
      : graph_(graph), consumers_(consumers), from_sinks_(from_sinks) {}

  std::span<const uint32_t> before(uint32_t node) const {
    return from_sinks_ ? consumers_.of(node) : graph_.producers(node);
  }
  std::span<const uint32_t> after(uint32_t node) const {
    return from_sinks_ ? graph_.producers(node) : consumers_.of(node);
  }
  // The node that stands at `place` in an order where all of before(node) come first.
  uint32_t at(uint32_t place) const { return from_sinks_ ? graph_.num_nodes() - 1 - place : place; }
  bool from_sinks() const { return from_sinks_; }

 private:
  const ScheduleInput& graph_;
  const Consumers& consumers_;
  const bool from_sinks_;
};

// As many signatures walk the graph together as have counts in two vector registers.
template <class Count>
constexpr size_t kTogether = 32 / sizeof(Count);

// For each node, how many of its own signature stand before it on one path, at most: those of level
// k need k batches before theirs. No path is longer than a Count can tell.
template <class Count>
std::vector<uint32_t> own_levels(const ScheduleInput& graph, const Walk& walk,
                                 std::span<const uint32_t> repeated) {
  constexpr size_t kBlock = kTogether<Count>;
  using Counts = std::array<Count, kBlock>;
  std::vector<uint32_t> level(graph.num_nodes());
  std::vector<Counts> on_path(repeated.empty() ? 0 : graph.num_nodes());
  std::vector<uint32_t> place(graph.num_signatures);
  for (size_t first = 0; first < repeated.size(); first += kBlock) {
    const size_t size = std::min(kBlock, repeated.size() - first);
    std::fill(place.begin(), place.end(), kBlock);
    for (uint32_t i = 0; i < size; ++i) place[repeated[first + i]] = i;
    for (uint32_t p = 0; p < graph.num_nodes(); ++p) {
      const uint32_t node = walk.at(p);
      Counts most{};
      for (const uint32_t other : walk.before(node)) {
        for (size_t i = 0; i < kBlock; ++i) most[i] = std::max(most[i], on_path[other][i]);
      }
      if (const uint32_t i = place[graph.signature[node]]; i < kBlock) {
        level[node] = static_cast<uint32_t>(most[i]++);
      }
      on_path[node] = most;
    }
  }
  return level;
}

std::vector<uint32_t> own_levels(const ScheduleInput& graph, const Walk& walk,
                                 std::span<const uint32_t> repeated, uint32_t depth) {
  const bool is_deep = depth >= static_cast<uint32_t>(std::numeric_limits<int16_t>::max());
  return is_deep ? own_levels<int32_t>(graph, walk, repeated)
                 : own_levels<int16_t>(graph, walk, repeated);
}

// One signature's nodes that have not run.
struct Kind {
  std::vector<uint32_t> ready;
  std::vector<uint32_t> left_at, ready_at;  // how many, by level
  uint32_t lowest = 0;                      // level that has any left
  double mean_place = 0;                    // in the walk

  // How much of its frontier, the nodes with none of their own kind left before them, is ready. If
  // all of it is, waiting could not make this batch larger. (What stands on the lowest level is
  // surely in the frontier; a node above it only if its own chain is shorter, and then it mostly is
  // ready.)
  double share() const {
    const double waiting = left_at[lowest] - ready_at[lowest];
    return static_cast<double>(ready.size()) / (static_cast<double>(ready.size()) + waiting);
  }
};

class Frontier {
 public:
  Frontier(const ScheduleInput& graph, const Walk& walk, std::span<const uint32_t> repeated,
           uint32_t depth)
      : graph_(graph),
        walk_(walk),
        level_(own_levels(graph, walk, repeated, depth)),
        kinds_(graph.num_signatures),
        waiting_for_(graph.num_nodes()) {
    std::vector<uint32_t> count(graph.num_signatures);
    for (uint32_t p = 0; p < graph.num_nodes(); ++p) {
      const uint32_t node = walk.at(p);
      Kind& kind = kinds_[graph.signature[node]];
      if (kind.left_at.size() <= level_[node]) kind.left_at.resize(level_[node] + 1);
      ++kind.left_at[level_[node]];
      kind.mean_place += p;
      ++count[graph.signature[node]];
    }
    for (uint32_t k = 0; k < kinds_.size(); ++k) {
      bound_ += graph.batchable[k] ? kinds_[k].left_at.size() : count[k];
      kinds_[k].ready_at.resize(kinds_[k].left_at.size());
      kinds_[k].mean_place /= std::max(count[k], 1U);
    }
  }

  Schedule run() && {
    for (uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      waiting_for_[node] = static_cast<uint32_t>(walk_.before(node).size());
      if (waiting_for_[node] == 0) make_ready(node);
    }
    while (order_.size() < graph_.num_nodes()) {
      if (!alone_.empty()) {
        const uint32_t node = alone_.back();
        alone_.pop_back();
        run_batch({&node, 1});
      } else {
        run_batch(take_best());
      }
    }
    return in_execution_order();
  }

 private:
  void make_ready(uint32_t node) {
    const uint32_t signature = graph_.signature[node];
    if (!graph_.batchable[signature]) {
      alone_.push_back(node);
      return;
    }
    Kind& kind = kinds_[signature];
    if (kind.ready.empty()) available_.push_back(signature);
    kind.ready.push_back(node);
    ++kind.ready_at[level_[node]];
  }

  // All ready nodes of the signature whose frontier is ready for the largest part; of several that
  // are ready as a whole any is safe, and the earliest in the mean is taken.
  std::vector<uint32_t> take_best() {
    const auto rank = [&](uint32_t signature) {
      const Kind& kind = kinds_[signature];
      return std::tuple(-kind.share(), kind.mean_place, signature);
    };
    const auto best = std::min_element(available_.begin(), available_.end(),
                                       [&](uint32_t a, uint32_t b) { return rank(a) < rank(b); });
    Kind& kind = kinds_[*best];
    *best = available_.back();
    available_.pop_back();
    std::vector<uint32_t> nodes = std::exchange(kind.ready, {});
    for (const uint32_t node : nodes) --kind.left_at[level_[node]], --kind.ready_at[level_[node]];
    while (kind.lowest + 1 < kind.left_at.size() && kind.left_at[kind.lowest] == 0) ++kind.lowest;
    return nodes;
  }

  void run_batch(std::span<const uint32_t> nodes) {
    order_.insert(order_.end(), nodes.begin(), nodes.end());
    batch_end_.push_back(static_cast<uint32_t>(order_.size()));
    for (const uint32_t node : nodes) {
      for (const uint32_t other : walk_.after(node)) {
        if (--waiting_for_[other] == 0) make_ready(other);
      }
    }
  }

  Schedule in_execution_order() {
    Schedule schedule;
    schedule.reaches_bound = batch_end_.size() == bound_;
    schedule.order.reserve(order_.size());
    schedule.batch_begin.push_back(0);
    const size_t batches = batch_end_.size();
    for (size_t i = 0; i < batches; ++i) {
      const size_t b = walk_.from_sinks() ? batches - 1 - i : i;
      const uint32_t begin = b == 0 ? 0 : batch_end_[b - 1];
      const std::span<uint32_t> members(&order_[begin], batch_end_[b] - begin);
      if (!std::ranges::is_sorted(members)) std::ranges::sort(members);
      schedule.order.insert(schedule.order.end(), &order_[begin], order_.data() + batch_end_[b]);
      schedule.batch_begin.push_back(static_cast<uint32_t>(schedule.order.size()));
    }
    return schedule;
  }

  const ScheduleInput& graph_;
  const Walk walk_;
  const std::vector<uint32_t> level_;
  std::vector<Kind> kinds_;            // by signature
  std::vector<uint32_t> available_;    // signatures that have ready nodes
  std::vector<uint32_t> waiting_for_;  // nodes of before(node) not yet run
  std::vector<uint32_t> alone_;        // unbatchable nodes that are ready
  std::vector<uint32_t> order_, batch_end_;
  size_t bound_ = 0;  // lower_bound(graph)
};

}  // namespace

FrontierSchedules::FrontierSchedules(const ScheduleInput& graph)
    : graph_(graph), consumers_(find_consumers(graph)) {
  const std::vector<uint32_t> depths = node_depths(graph);
  repeated_ = find_repeated(graph, depths);
  for (const uint32_t depth : depths) depth_ = std::max(depth_, depth);
}

Schedule FrontierSchedules::from(Start start) const {
  return Frontier(graph_, Walk(graph_, consumers_, start == Start::kSinks), repeated_, depth_)
      .run();
}

namespace {

// The sufficient condition of Chen et al. 2023 (ED-Batch, arXiv 2302.03851), section 2.3, as a
// heuristic: from the sinks backwards, and where that is above the bound from the sources too.
class FrontierPolicy final : public Policy {
 public:
  std::string_view name() const override { return "frontier"; }

  Schedule schedule(const ScheduleInput& graph) const override {
    const FrontierSchedules frontier(graph);
    Schedule backwards = frontier.from(FrontierSchedules::Start::kSinks);
    if (backwards.reaches_bound) return backwards;
    Schedule forwards = frontier.from(FrontierSchedules::Start::kSources);
    return forwards.num_batches() < backwards.num_batches() ? forwards : backwards;
  }
};

}  // namespace

std::unique_ptr<const Policy> make_frontier_policy() { return std::make_unique<FrontierPolicy>(); }

}  // namespace autobatch

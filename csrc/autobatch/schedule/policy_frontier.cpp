#include "autobatch/common/pooled_memory.h"
#include "autobatch/schedule/graph_metrics.h"
#include "autobatch/schedule/policies.h"

#include <algorithm>
#include <array>
#include <limits>

namespace autobatch {
namespace {

// A walk over the graph from its sinks or from its sources. at() returns the node at a position of
// the walk. Each node comes after all nodes that must run before it. after() returns the nodes that
// wait for the given node.
class Walk {
 public:
  Walk(const ScheduleInput& graph, bool from_sinks) : graph_(graph), from_sinks_(from_sinks) {
    if (!from_sinks) consumers_ = find_consumers(graph);
  }

  std::span<const uint32_t> after(uint32_t node) const {
    return from_sinks_ ? graph_.producers(node) : consumers_.of(node);
  }
  uint32_t at(uint32_t place) const { return from_sinks_ ? graph_.num_nodes() - 1 - place : place; }
  bool from_sinks() const { return from_sinks_; }

 private:
  const ScheduleInput& graph_;
  const bool from_sinks_;
  Consumers consumers_;
};

// The data of one node during a run. The data is in one struct, because nodes are visited in an
// irregular order.
struct Waiting {
  uint32_t edges = 0;  // edges from nodes that have not run; once the node runs: its batch number
  uint32_t signature = 0;
  uint32_t level = 0;  // largest number of nodes of its signature before it on one path
};

// The nodes of one signature that have not run. All signatures share one array of ready nodes, and
// each signature has a separate range of this array.
struct Kind {
  uint32_t first_ready = 0, end_ready = 0;
  uint32_t lowest = 0;            // lowest level that has nodes left
  std::vector<uint32_t> waiting;  // number of nodes that are not ready, by level
  double mean_place = 0;          // mean position in the walk

  uint32_t ready() const { return end_ready - first_ready; }
  // Returns how many nodes of the frontier are not ready. A node is in the frontier if all nodes of
  // its signature that precede it on a path have run. (The result includes only nodes on the lowest
  // level, which are all in the frontier. Nodes on higher levels can also be in the frontier, but
  // these nodes are usually ready.)
  uint32_t missing() const { return waiting[lowest]; }
  // Compares the ready shares of the two frontiers. If a whole frontier is ready, waiting cannot
  // make its batch larger. In a tie, the signature with the earlier mean position goes first. If
  // both frontiers are completely ready, either choice is safe.
  bool goes_before(const Kind& other) const {
    const uint64_t mine = uint64_t{ready()} * other.missing();
    const uint64_t its = uint64_t{other.ready()} * missing();
    return mine != its ? mine > its : mean_place < other.mean_place;
  }
};

// Finds the number of edges that lead to each node, and the levels of the nodes. Before a node of
// level k runs, k batches of its signature must run. One walk over the graph finds the levels of
// several signatures, whose counts fit into one or two vector registers.
template <class Count, size_t kBlock>
class OwnLevels {
 public:
  OwnLevels(const ScheduleInput& graph, const Walk& walk, Waiting* nodes)
      : graph_(graph),
        walk_(walk),
        nodes_(nodes),
        on_path_(pooled_array<Counts>(graph.num_nodes())) {
    for (size_t i = 0; i < kBlock; ++i) one_[i][i] = 1;
  }

  // Finds the levels for the nodes of `signatures`. Returns false if a path has more nodes of one
  // signature than a Count can hold.
  bool find(std::span<const uint32_t> signatures) {
    std::vector<uint8_t> place(graph_.num_signatures);
    uint32_t highest = 0;
    size_t done = 0;
    std::fill_n(nodes_, graph_.num_nodes(), Waiting{});
    do {
      const size_t size = std::min(kBlock, signatures.size() - done);
      std::fill(place.begin(), place.end(), kBlock);
      for (size_t i = 0; i < size; ++i) place[signatures[done + i]] = static_cast<uint8_t>(i);
      std::fill_n(on_path_.get(), graph_.num_nodes(), Counts{});
      highest = std::max(highest, done == 0 ? walk_once<true>(place) : walk_once<false>(place));
      done += size;
    } while (done < signatures.size() && highest < std::numeric_limits<Count>::max());
    return highest < std::numeric_limits<Count>::max();
  }

 private:
  using Counts = std::array<Count, kBlock>;

  // Returns the highest level. If a Count cannot hold this level, the walk stops early and the
  // results are incomplete.
  template <bool kFirst>
  uint32_t walk_once(std::span<const uint8_t> place) {
    uint32_t highest = 0;
    for (uint32_t p = 0; p < graph_.num_nodes(); ++p) {
      const uint32_t node = walk_.at(p);
      const uint8_t i = place[graph_.signature[node]];
      if (i < kBlock) {
        nodes_[node].level = on_path_[node][i];
        highest = std::max(highest, nodes_[node].level);
        if (highest == std::numeric_limits<Count>::max()) return highest;
      }
      // All counts are added at once. If only one count were written, the load of the whole vector
      // would have to wait until that count is in memory.
      Counts most;
      for (size_t k = 0; k < kBlock; ++k) most[k] = on_path_[node][k] + one_[i][k];
      for (const uint32_t other : walk_.after(node)) {
        Counts& there = on_path_[other];
        for (size_t k = 0; k < kBlock; ++k) there[k] = std::max(there[k], most[k]);
        if constexpr (kFirst) ++nodes_[other].edges;
      }
    }
    return highest;
  }

  const ScheduleInput& graph_;
  const Walk& walk_;
  Waiting* nodes_;
  PooledArray<Counts> on_path_;           // by node: largest numbers of nodes on a path to the node
  std::array<Counts, kBlock + 1> one_{};  // entry i is 1 at position i; the last entry is 0
};

// Returns the signatures that may have two nodes on one path. A walk over the graph finds these
// signatures. If `room` is sufficient for all signatures, returns all batchable signatures without
// a walk.
std::vector<uint32_t> find_counted(const ScheduleInput& graph, size_t room) {
  if (graph.num_signatures > room) return find_repeated(graph);
  std::vector<uint32_t> batchable;
  for (uint32_t k = 0; k < graph.num_signatures; ++k) {
    if (graph.batchable[k]) batchable.push_back(k);
  }
  return batchable;
}

PooledArray<Waiting> find_own_levels(const ScheduleInput& graph, const Walk& walk) {
  constexpr size_t kFew = 16;
  const std::vector<uint32_t> counted = find_counted(graph, 2 * kFew);
  auto nodes = pooled_array<Waiting>(graph.num_nodes());
  const bool found = counted.size() <= kFew
                         ? OwnLevels<uint8_t, kFew>(graph, walk, nodes.get()).find(counted)
                         : OwnLevels<uint8_t, 2 * kFew>(graph, walk, nodes.get()).find(counted);
  if (found || OwnLevels<uint16_t, 16>(graph, walk, nodes.get()).find(counted)) return nodes;
  OwnLevels<uint32_t, 8>(graph, walk, nodes.get()).find(counted);
  return nodes;
}

class Frontier {
 public:
  Frontier(const ScheduleInput& graph, bool from_sinks)
      : graph_(graph),
        walk_(graph, from_sinks),
        nodes_(find_own_levels(graph, walk_)),
        kinds_(graph.num_signatures),
        ready_(pooled_array<uint32_t>(graph.num_nodes())) {
    std::vector<uint32_t> count(graph.num_signatures);
    std::vector<uint64_t> places(graph.num_signatures);
    for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
      const uint32_t signature = graph.signature[node];
      const uint32_t level = nodes_[node].level;
      std::vector<uint32_t>& waiting = kinds_[signature].waiting;
      if (waiting.size() <= level) waiting.resize(level + 1);
      ++waiting[level];
      ++count[signature];
      places[signature] += node;
      nodes_[node].signature = signature;
    }
    uint32_t begin = 0;
    for (uint32_t k = 0; k < kinds_.size(); ++k) {
      Kind& kind = kinds_[k];
      bound_ += graph.batchable[k] ? kind.waiting.size() : count[k];
      kind.first_ready = kind.end_ready = begin;
      begin += count[k];
      const uint64_t last = graph.num_nodes() - 1;
      const uint64_t sum = from_sinks ? count[k] * last - places[k] : places[k];
      kind.mean_place = static_cast<double>(sum) / std::max(count[k], 1U);
    }
  }

  Schedule run() && {
    for (uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      if (nodes_[node].edges == 0) make_ready(node);
    }
    for (size_t done = 0; done < graph_.num_nodes(); done += sizes_.back()) {
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
    const Waiting& now = nodes_[node];
    if (!graph_.batchable[now.signature]) {
      alone_.push_back(node);
      return;
    }
    Kind& kind = kinds_[now.signature];
    if (kind.ready() == 0) available_.push_back(now.signature);
    ready_[kind.end_ready++] = node;
    --kind.waiting[now.level];
  }

  // Returns all ready nodes of the signature whose frontier has the largest ready share.
  std::span<const uint32_t> take_best() {
    size_t best = 0;
    for (size_t i = 1; i < available_.size(); ++i) {
      const Kind& kind = kinds_[available_[i]];
      const Kind& before = kinds_[available_[best]];
      const bool is_first =
          available_[i] < available_[best] ? !before.goes_before(kind) : kind.goes_before(before);
      if (is_first) best = i;
    }
    Kind& kind = kinds_[available_[best]];
    available_[best] = available_.back();
    available_.pop_back();
    const std::span<const uint32_t> nodes(&ready_[kind.first_ready], kind.ready());
    kind.first_ready = kind.end_ready;
    while (kind.lowest + 1 < kind.waiting.size() && kind.waiting[kind.lowest] == 0) ++kind.lowest;
    return nodes;
  }

  void run_batch(std::span<const uint32_t> nodes) {
    const auto batch = static_cast<uint32_t>(sizes_.size());
    sizes_.push_back(static_cast<uint32_t>(nodes.size()));
    for (const uint32_t node : nodes) {
      nodes_[node].edges = batch;
      for (const uint32_t other : walk_.after(node)) {
        if (--nodes_[other].edges == 0) make_ready(other);
      }
    }
  }

  // Returns the schedule. The nodes of a batch may have become ready in any order. This function
  // adds the nodes to their batches in order of node number, so each batch is in capture order.
  Schedule in_execution_order() {
    Schedule schedule;
    schedule.reaches_bound = sizes_.size() == bound_;
    schedule.batch_begin.push_back(0);
    const size_t batches = sizes_.size();
    std::vector<uint32_t> next(batches);  // next position in `order`, by batch number
    for (size_t b = 0; b < batches; ++b) {
      const size_t taken = walk_.from_sinks() ? batches - 1 - b : b;
      next[taken] = schedule.batch_begin.back();
      schedule.batch_begin.push_back(next[taken] + sizes_[taken]);
    }
    schedule.order.resize(graph_.num_nodes());
    for (uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      schedule.order[next[nodes_[node].edges]++] = node;
    }
    return schedule;
  }

  const ScheduleInput& graph_;
  const Walk walk_;
  PooledArray<Waiting> nodes_;
  std::vector<Kind> kinds_;          // one Kind per signature
  std::vector<uint32_t> available_;  // signatures that have ready nodes
  PooledArray<uint32_t> ready_;
  std::vector<uint32_t> alone_;  // unbatchable nodes that are ready
  std::vector<uint32_t> sizes_;  // by batch: number of its nodes
  size_t bound_ = 0;             // lower_bound(graph)
};

}  // namespace

Schedule frontier_schedule(const ScheduleInput& graph, FrontierStart start) {
  return Frontier(graph, start == FrontierStart::kSinks).run();
}

namespace {

// Uses the sufficient condition of Chen et al. 2023 (ED-Batch, arXiv 2302.03851), section 2.3, as a
// heuristic. The heuristic walks backwards from the sinks. If the schedule has more batches than
// the lower bound, a second walk starts from the sources.
class FrontierPolicy final : public Policy {
 public:
  std::string_view name() const override { return "frontier"; }

  Schedule schedule(const ScheduleInput& graph) const override {
    Schedule backwards = frontier_schedule(graph, FrontierStart::kSinks);
    if (backwards.reaches_bound) return backwards;
    Schedule forwards = frontier_schedule(graph, FrontierStart::kSources);
    return forwards.num_batches() < backwards.num_batches() ? forwards : backwards;
  }
};

}  // namespace

std::unique_ptr<const Policy> make_frontier_policy() { return std::make_unique<FrontierPolicy>(); }

}  // namespace autobatch

#include "autobatch/schedule/schedule_cache.h"
#include "schedule_test.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

// Returns a graph with any structure that a policy must accept: nodes without producers, duplicate
// producers, unused signatures, unbatchable and heavy signatures.
ScheduleGraph random_graph(uint32_t seed) {
  std::mt19937 random(seed);
  const uint32_t signatures = 1 + random() % 20;
  ScheduleGraph graph;
  for (uint32_t s = 0; s < signatures; ++s) {
    graph.declare("s" + std::to_string(s), random() % 8 != 0, random() % 3 == 0);
  }
  const uint32_t nodes = random() % 200;
  const uint32_t reach = 1 + random() % 50;
  for (uint32_t node = 0; node < nodes; ++node) {
    Nodes producers;
    for (uint32_t i = node == 0 ? 0 : random() % 4; i > 0; --i) {
      producers.push_back(node - 1 - random() % std::min(node, reach));
    }
    graph.add("s" + std::to_string(random() % signatures), producers);
  }
  return graph;
}

// Computes the lower bound by its definition, one signature at a time.
uint64_t plain_lower_bound(const ScheduleInput& graph) {
  uint64_t bound = 0;
  for (uint32_t s = 0; s < graph.num_signatures; ++s) {
    uint64_t count = 0, longest = 0;
    std::vector<uint64_t> on_path(graph.num_nodes());
    for (uint32_t node = 0; node < graph.num_nodes(); ++node) {
      for (const uint32_t producer : graph.producers(node)) {
        on_path[node] = std::max(on_path[node], on_path[producer]);
      }
      if (graph.signature[node] == s) ++count, ++on_path[node];
      longest = std::max(longest, on_path[node]);
    }
    bound += graph.batchable[s] ? longest : count;
  }
  return bound;
}

TEST_CASE("every policy schedules the graphs that have nothing to batch", "[schedule]") {
  for (const std::string_view policy : policy_names()) {
    CAPTURE(std::string(policy));
    CHECK(batches(policy, ScheduleGraph()) == "");
    CHECK(find_policy(policy).schedule(ScheduleInput{}).num_batches() == 0);

    ScheduleGraph single;
    single.add("a");
    CHECK(batches(policy, single) == "a1");

    ScheduleGraph chain;
    chain.add_chain("a", 4);
    CHECK(batches(policy, chain) == "a1 a1 a1 a1");

    ScheduleGraph alternating;
    const uint32_t a = alternating.add("a");
    alternating.add("a", {alternating.add("b", {a})});
    CHECK(batches(policy, alternating) == "a1 b1 a1");
  }
}

TEST_CASE("every policy batches independent instances", "[schedule]") {
  for (const std::string_view policy : policy_names()) {
    CAPTURE(std::string(policy));
    ScheduleGraph chains;
    for (int i = 0; i < 3; ++i) chains.add_chain("a", 4);
    CHECK(batches(policy, chains) == "a3 a3 a3 a3");

    ScheduleGraph uneven;
    for (const int length : {1, 3, 2}) uneven.add_chain("a", length);
    // frontier schedules from the sinks here, so the chains end together.
    CHECK(batches(policy, uneven) == (policy == "frontier" ? "a1 a2 a3" : "a3 a2 a1"));

    ScheduleGraph tree;
    Nodes level;
    for (int i = 0; i < 8; ++i) level.push_back(tree.add("leaf"));
    for (; level.size() > 1; level.erase(level.begin(), level.begin() + 2)) {
      level.push_back(tree.add("inner", {level[0], level[1]}));
    }
    CHECK(batches(policy, tree) == "leaf8 inner4 inner2 inner1");
  }
}

TEST_CASE("a node may read the same producer twice", "[schedule]") {
  for (const std::string_view policy : policy_names()) {
    ScheduleGraph graph;
    for (int i = 0; i < 2; ++i) {
      const uint32_t x = graph.add("x");
      graph.add("square", {x, x});
    }
    CHECK(batches(policy, graph) == "x2 square2");
  }
}

// Sequences of different lengths, the case for which the DyNet paper introduces the agenda: the
// losses have different depths, but all of them can wait for the longest sequence.
TEST_CASE("agenda joins the losses of sequences of different lengths", "[schedule]") {
  ScheduleGraph at_end;
  for (const int length : {2, 4, 3}) at_end.add("loss", {at_end.add_chain("rnn", length)});
  CHECK(batches("agenda", at_end) == "rnn3 rnn3 rnn2 rnn1 loss3");
  CHECK(batches("depth", at_end) == "rnn3 rnn3 rnn2 loss1 rnn1 loss1 loss1");
  CHECK(lower_bound(at_end.view()) == 5);

  ScheduleGraph each_step;
  for (const int length : {2, 3}) {
    uint32_t state = each_step.add("rnn");
    each_step.add("loss", {state});
    for (int i = 1; i < length; ++i) {
      state = each_step.add("rnn", {state});
      each_step.add("loss", {state});
    }
  }
  CHECK(batches("agenda", each_step) == "rnn2 rnn2 rnn1 loss5");
  CHECK(batches("depth", each_step) == "rnn2 rnn2 loss2 rnn1 loss2 loss1");
  CHECK(lower_bound(each_step.view()) == 4);
}

// A tree with an output at each node, for which both heuristics are suboptimal according to
// ED-Batch (arXiv 2302.03851). In a lopsided tree most outputs are shallow: their mean depth is
// 13/7, below the inner nodes' 2, so each output runs as soon as it is ready. The mean is over all
// outputs. The mean over the remaining outputs would rise to 3 after the first batch, and the
// schedule would be optimal.
TEST_CASE("agenda prefers the lowest mean depth over all nodes of a signature", "[schedule]") {
  ScheduleGraph graph;
  uint32_t root = graph.add("leaf");
  graph.add("output", {root});
  for (int i = 0; i < 3; ++i) {
    const uint32_t leaf = graph.add("leaf");
    graph.add("output", {leaf});
    root = graph.add("inner", {root, leaf});
    graph.add("output", {root});
  }
  CHECK(batches("agenda", graph) == "leaf4 output4 inner1 output1 inner1 output1 inner1 output1");
  CHECK(batches("depth", graph) == "leaf4 output4 inner1 output1 inner1 output1 inner1 output1");
  CHECK(lower_bound(graph.view()) == 5);
}

TEST_CASE("agenda runs unbatchable nodes first, each alone", "[schedule]") {
  ScheduleGraph graph;
  graph.declare("light", true, false);
  graph.declare("alone", false, false);
  const uint32_t x = graph.add("light");
  graph.add("light", {graph.add("alone", {x})});
  graph.add("alone");
  graph.add("alone");
  CHECK(batches("agenda", graph) == "alone1 alone1 light1 alone1 light1");
  CHECK(batches("depth", graph) == "light1 alone1 alone1 alone1 light1");
  CHECK(lower_bound(graph.view()) == 5);
}

TEST_CASE("agenda breaks ties in favour of the light, then of the smaller id", "[schedule]") {
  ScheduleGraph graph;
  graph.declare("matmul", true, true);
  graph.declare("tanh", true, false);
  graph.declare("relu", true, false);
  for (const char* name : {"relu", "matmul", "tanh"}) graph.add(name);
  CHECK(batches("agenda", graph) == "tanh1 relu1 matmul1");

  // This only resolves ties: a lower mean depth has priority.
  graph.add("tanh", {0});
  CHECK(batches("agenda", graph) == "relu1 matmul1 tanh2");
}

TEST_CASE("the members of a batch are in capture order", "[schedule]") {
  ScheduleGraph graph;
  graph.declare("early", true, false);
  const uint32_t late = graph.add("late");
  const uint32_t early = graph.add("early");
  const uint32_t ready_last = graph.add("joined", {late});
  const uint32_t ready_first = graph.add("joined", {early});
  CHECK(members(run("agenda", graph)) ==
        std::vector<Nodes>{{early}, {late}, {ready_last, ready_first}});
}

TEST_CASE("random graphs get valid schedules, never below the bound", "[schedule]") {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    const ScheduleGraph graph = random_graph(seed);
    const uint64_t bound = lower_bound(graph.view());
    CHECK(bound == plain_lower_bound(graph.view()));
    for (const std::string_view policy : policy_names()) {
      CAPTURE(std::string(policy));
      const Schedule schedule = run(policy, graph);
      CHECK(bound <= schedule.num_batches());
      const std::vector<Nodes> ran = members(schedule);
      CHECK(std::all_of(ran.begin(), ran.end(), [](const Nodes& batch) {
        return std::is_sorted(batch.begin(), batch.end());
      }));
      CHECK(ran == members(run(policy, random_graph(seed))));
    }
  }
}

// Binary Tree-LSTMs as captured op by op, with a loss at each node and a sum of the losses of each
// instance.
struct TreeLstm {
  ScheduleGraph graph;
  Nodes losses;

  TreeLstm() {
    for (const char* name : {"linear_leaf", "linear_inner", "linear_out"}) {
      graph.declare(name, true, true);
    }
  }

  struct State {
    uint32_t h, c;
  };

  uint32_t gated(uint32_t gates, uint32_t value) {
    return graph.add("mul", {graph.add("sigmoid", {gates}), value});
  }

  State finish(uint32_t gates, uint32_t c) {
    const State state{gated(gates, graph.add("tanh", {c})), c};
    losses.push_back(graph.add("cross_entropy", {graph.add("linear_out", {state.h})}));
    return state;
  }

  State leaf() {
    const uint32_t gates = graph.add("linear_leaf", {graph.add("embedding")});
    return finish(gates, gated(gates, graph.add("tanh", {gates})));
  }

  State inner(State left, State right) {
    const uint32_t gates = graph.add("linear_inner", {graph.add("cat", {left.h, right.h})});
    uint32_t c = gated(gates, graph.add("tanh", {gates}));
    c = graph.add("add", {c, gated(gates, left.c)});
    c = graph.add("add", {c, gated(gates, right.c)});
    return finish(gates, c);
  }

  void finish_instance() {
    graph.add("sum", {graph.add("stack", losses)});
    losses.clear();
  }
};

TreeLstm random_trees(unsigned seed) {
  std::mt19937 random(seed);
  TreeLstm model;
  for (int instance = 0; instance < 64; ++instance) {
    std::vector<TreeLstm::State> forest(5 + random() % 36);
    for (TreeLstm::State& state : forest) state = model.leaf();
    for (; forest.size() > 1; forest.pop_back()) {
      const size_t i = random() % (forest.size() - 1);
      forest[i] = model.inner(forest[i], forest[i + 1]);
      std::rotate(forest.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                  forest.begin() + static_cast<std::ptrdiff_t>(i) + 2, forest.end());
    }
    model.finish_instance();
  }
  return model;
}

TEST_CASE("policies stay near the bound on Tree-LSTMs of random trees", "[schedule]") {
  TreeLstm model = random_trees(1);
  const auto bound = static_cast<double>(lower_bound(model.graph.view()));
  const auto agenda = static_cast<double>(run("agenda", model.graph).num_batches());
  const auto depth = static_cast<double>(run("depth", model.graph).num_batches());
  CAPTURE(bound, agenda, depth);
  CHECK(agenda <= 1.25 * bound);
  CHECK(agenda < depth);
  for (unsigned seed = 1; seed < 6; ++seed) {
    TreeLstm trees = random_trees(seed);
    const Schedule frontier = run("frontier", trees.graph);
    CHECK(frontier.num_batches() == lower_bound(trees.graph.view()));
    CHECK(frontier.reaches_bound);
  }
}

TEST_CASE("frontier waits for what would join, at both ends", "[schedule]") {
  ScheduleGraph graph;  // chains of different lengths
  for (int length : {2, 5, 3}) {
    uint32_t last = graph.add("first");
    for (int step = 0; step < length; ++step) last = graph.add("step", {last});
    graph.add("last", {last});
  }
  CHECK(run("frontier", graph).num_batches() == 7);
  CHECK(run("frontier", graph).num_batches() == lower_bound(graph.view()));
}

TEST_CASE("frontier takes chains of any length, of many kinds", "[schedule]") {
  // {length, number of signatures}: at most 32 signatures and more, and levels that take 8, 16 and
  // 32 bits.
  const std::pair<uint32_t, uint32_t> cases[] = {
      {100, 20}, {100, 40}, {20 * 300, 20}, {40 * 300, 40}, {32766, 1}, {32767, 1}, {70000, 1}};
  for (const auto& [length, kinds] : cases) {
    ScheduleGraph graph;
    for (uint32_t start : {0U, length / 2}) {
      uint32_t last = graph.add("first");
      for (uint32_t step = start; step < length; ++step) {
        last = graph.add("step" + std::to_string(step % kinds), {last});
      }
      graph.add("last", {last});
    }
    const Schedule schedule = run("frontier", graph);
    CHECK(schedule.num_batches() == length + 2);
    CHECK(schedule.reaches_bound);
  }
}

TEST_CASE("frontier says that it reaches the bound only where it does", "[schedule]") {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    ScheduleGraph graph;
    graph.declare("s0", false, false);
    for (uint32_t node = 0; node < 40; ++node) {
      std::vector<uint32_t> producers;
      for (uint32_t p = 0; node > 0 && p < random() % 3; ++p) producers.push_back(random() % node);
      graph.add("s" + std::to_string(random() % 5), producers);
    }
    const Schedule schedule = run("frontier", graph);
    const uint64_t bound = lower_bound(graph.view());
    CHECK(schedule.num_batches() >= bound);
    CHECK(schedule.reaches_bound == (schedule.num_batches() == bound));
  }
}

TEST_CASE("auto takes the best of the others, and remembers it for the family", "[schedule]") {
  const auto batches_of = [](std::string_view policy, const ScheduleInput& graph) {
    return find_policy(policy).schedule(graph).num_batches();
  };
  TreeLstm model = random_trees(7);
  ScheduleInput trees = model.graph.view();
  for (const std::string_view name : policy_names()) {
    CHECK(batches_of("auto", trees) <= batches_of(name, trees));
  }
  trees.family = 12345;
  for (int use = 0; use < 200; ++use) {
    const Schedule schedule = find_policy("auto").schedule(trees);
    CHECK(schedule.num_batches() == batches_of("frontier", trees));
    if (use % 50 == 0) CHECK_NOTHROW(validate(trees, schedule));
  }
  // A graph of the same family, for which every policy is equally good.
  ScheduleGraph small;
  small.add("leaf");
  ScheduleInput one = small.view();
  one.family = 12345;
  CHECK(batches_of("auto", one) == 1);
}

TEST_CASE("auto keeps the schedules of structures that come again", "[schedule]") {
  forget_schedules();
  const auto schedule = [](ScheduleInput graph) {
    graph.family = 54321;
    return find_policy("auto").schedule(graph);
  };
  const TreeLstm model = random_trees(11);
  const Schedule first = schedule(model.graph.view());
  CHECK(forget_schedules() == 0);  // a structure seen once is not kept
  for (int use = 0; use < 5; ++use) {
    CHECK(members(schedule(model.graph.view())) == members(first));
  }
  // The same arrays except for one edge, one signature, or the batchable flags.
  const ScheduleInput graph = model.graph.view();
  Nodes inputs(graph.inputs.begin(), graph.inputs.end());
  inputs.back() = inputs.front();
  Nodes signatures(graph.signature.begin(), graph.signature.end());
  std::swap(signatures.front(), signatures.back());
  const std::vector<uint8_t> none(graph.num_signatures, 0);
  for (int use = 0; use < 3; ++use) {
    for (int changed = 0; changed < 3; ++changed) {
      ScheduleInput other = graph;
      if (changed == 0) other.inputs = inputs;
      if (changed == 1) other.signature = signatures;
      if (changed == 2) other.batchable = none;
      CHECK_NOTHROW(validate(other, schedule(other)));
    }
  }
  CHECK(forget_schedules() > 0);
  CHECK(forget_schedules() == 0);
}

TEST_CASE("the lower bound is the longest path of each signature", "[schedule]") {
  CHECK(lower_bound(ScheduleInput{}) == 0);

  // There are more signatures than one block of the computation holds. Each signature has two nodes
  // on the path and one node beside the path.
  ScheduleGraph graph;
  uint32_t last = graph.add("start");
  for (int round = 0; round < 2; ++round) {
    for (int s = 0; s < 20; ++s) last = graph.add("s" + std::to_string(s), {last});
  }
  for (int s = 0; s < 20; ++s) graph.add("s" + std::to_string(s));
  CHECK(lower_bound(graph.view()) == 41);

  // Two nodes of different depths need not be on one path.
  ScheduleGraph apart;
  apart.add("a");
  apart.add("a", {apart.add("b")});
  CHECK(lower_bound(apart.view()) == 2);
}

TEST_CASE("a policy is found by its name", "[schedule]") {
  CHECK(policy_names() == std::vector<std::string_view>{"auto", "agenda", "depth", "frontier"});
  for (const std::string_view name : policy_names()) CHECK(find_policy(name).name() == name);

  std::string message;
  try {
    find_policy("Agenda");
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message ==
        "unknown batching policy 'Agenda', expected one of: 'auto', 'agenda', 'depth', "
        "'frontier'");
}

}  // namespace
}  // namespace autobatch

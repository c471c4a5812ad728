#include "schedule_test.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace autobatch {
namespace {

std::string complaint(const ScheduleInput& graph, const Schedule& schedule) {
  try {
    validate(graph, schedule);
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("validate says what is wrong with a schedule", "[schedule]") {
  ScheduleGraph graph;
  graph.declare("a", true, false);
  graph.declare("b", true, false);
  graph.declare("alone", false, false);
  for (const char* name : {"a", "a", "alone", "alone"}) graph.add(name);
  graph.add("b", {0});
  const auto wrong = [&](Nodes order, Nodes batch_begin) {
    return complaint(graph.view(), {std::move(order), std::move(batch_begin)});
  };
  CHECK(wrong({0, 1, 2, 3, 4}, {0, 2, 3, 4, 5}) == "");
  CHECK(wrong({0, 1, 2, 3}, {0, 2, 3, 4}) == "node 4 never runs");
  CHECK(wrong({0, 1, 2, 3, 4, 1}, {0, 2, 3, 4, 5, 6}) == "node 1 runs twice, in batches 0 and 4");
  CHECK(wrong({0, 1, 2, 3, 5}, {0, 2, 3, 4, 5}) == "batch 3 runs node 5 of 5");
  CHECK(wrong({4, 0, 1, 2, 3}, {0, 1, 3, 4, 5}) ==
        "node 4 in batch 0 reads node 0, which runs in batch 1");
  CHECK(wrong({0, 4, 1, 2, 3}, {0, 2, 3, 4, 5}) ==
        "node 4 in batch 0 reads node 0, which runs in batch 0");
  CHECK(wrong({0, 1, 4, 2, 3}, {0, 1, 3, 4, 5}) ==
        "batch 1 runs node 1 of signature 0 with node 4 of signature 1");
  CHECK(wrong({0, 1, 2, 3, 4}, {0, 2, 4, 5}) ==
        "batch 1 runs 2 nodes of signature 2, which is not batchable");
  for (const Nodes& batch_begin : {Nodes{}, {0, 2, 3, 4}, {1, 2, 3, 4, 5}, {0, 2, 2, 3, 4, 5}}) {
    CHECK(wrong({0, 1, 2, 3, 4}, batch_begin) ==
          "batch_begin does not divide the 5 scheduled nodes into batches of at least one");
  }
}

TEST_CASE("validate says what is wrong with a graph", "[schedule]") {
  ScheduleGraph forward;
  forward.add("a");
  forward.add("a", {1});
  CHECK(complaint(forward.view(), {{0, 1}, {0, 1, 2}}) ==
        "node 1 reads node 1, which was not captured before it");

  ScheduleGraph good;
  good.add("a");
  good.add("a", {0});
  const Schedule schedule = run("agenda", good);
  ScheduleInput bad = good.view();
  bad.num_signatures = 0;
  CHECK(complaint(bad, schedule) == "batchable has 1 entries for 0 signatures");
  bad = good.view();
  bad.heavy = {};
  CHECK(complaint(bad, schedule) == "heavy has 0 entries for 1 signatures");
  bad = good.view();
  bad.input_begin = bad.input_begin.first(2);
  CHECK(complaint(bad, schedule) == "input_begin has 2 entries for 2 nodes");
  bad = good.view();
  bad.inputs = {};
  CHECK(complaint(bad, schedule) == "input_begin does not divide the 0 inputs among the nodes");
  bad = good.view();
  const Nodes unknown = {0, 1};
  bad.signature = unknown;
  CHECK(complaint(bad, schedule) == "node 1 has signature 1 of 1");
}

}  // namespace
}  // namespace autobatch

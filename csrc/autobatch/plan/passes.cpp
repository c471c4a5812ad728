#include "autobatch/plan/passes.h"

#include "autobatch/common/switches.h"
#include "autobatch/plan/chunk_batches.h"
#include "autobatch/plan/common_subexpressions.h"
#include "autobatch/plan/find_varying_numbers.h"
#include "autobatch/plan/fuse_cat_matmul.h"
#include "autobatch/plan/fuse_sums.h"
#include "autobatch/plan/member_order.h"
#include "autobatch/plan/merge_by_weight.h"

#include <span>

namespace autobatch {
namespace {

// The passes before scheduling, in the order in which they run. A short pass can be a function in
// this file.
struct GraphPass {
  Switch on;
  // Runs the pass, and returns the number of rewrites.
  size_t (*run)(Tape& tape, FlushGraph& graph, SignatureTable& signatures);
  bool needs_rebuild;  // whether the graph is rebuilt after rewrites
};
GraphPass graph_passes[] = {
    {{Switch::Kind::kPass, "fuse_sums"},
     [](Tape& t, FlushGraph& g, SignatureTable& s) { return fuse_sums(t, g, s); },
     true},
    // Runs after fuse_sums, because merged lookups could not become part of a sum.
    {{Switch::Kind::kPass, "common_subexpressions"}, eliminate_common_subexpressions, true},
    {{Switch::Kind::kPass, "fuse_cat_matmul"}, fuse_cat_matmul, false},
};

Switch merge_by_weight_switch(Switch::Kind::kPass, "merge_by_weight");
Switch member_order_switch(Switch::Kind::kPass, "member_order");
Switch chunk_batches_switch(Switch::Kind::kPass, "chunk_batches");

void note(Switch& pass, size_t changes, Report& report) {
  if (changes == 0) return;
  pass.add_uses(changes);
  report.passes[pass.name()] += changes;
}

}  // namespace

void rewrite_graph(Tape& tape, FlushGraph& graph, InternTables& tables, at::ArrayRef<NodeId> nodes,
                   const std::vector<ValueId>* held, Report& report) {
  for (GraphPass& pass : graph_passes) {
    const size_t rewrites = pass.on.is_on() ? pass.run(tape, graph, tables.signatures) : 0;
    if (rewrites != 0 && pass.needs_rebuild) graph.build(tape, nodes, held);
    note(pass.on, rewrites, report);
  }
  if (varying_numbers_switch.is_on()) {
    note(varying_numbers_switch, find_varying_numbers(tape, graph, tables.numbers), report);
  }
}

void rewrite_schedule(FlushRecord& record, FlushGraph& graph, size_t first_batch, Report& report) {
  if (merge_by_weight_switch.is_on()) {
    note(merge_by_weight_switch, merge_by_weight(record, first_batch, graph), report);
  }
  const auto batches = std::span(record.batches).subspan(first_batch);
  const MemberOrder order = order_members(graph, batches, member_order_switch.is_on());
  note(member_order_switch, order.num_sorted, report);
  if (chunk_batches_switch.is_on()) {
    note(chunk_batches_switch, chunk_batches(record, first_batch, graph, order.first_uses), report);
  }
}

}  // namespace autobatch

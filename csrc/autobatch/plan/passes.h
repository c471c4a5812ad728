// The passes over the graph of a flush. The table in passes.cpp lists the passes before scheduling.
// After them, the pass varying_numbers looks for numbers, and changes only how later calls are
// captured. The passes merge_by_weight, member_order and chunk_batches run after scheduling. Each
// pass has a switch with its name (common/switches.h), and a function in a separate header or in
// passes.cpp. The graph of a cell has two other passes, fuse_shared_input_linear and
// elementwise_fusion, which run when the cell is captured.
#pragma once

#include "autobatch/graph/intern_tables.h"
#include "autobatch/plan/flush_graph.h"
#include "autobatch/report.h"
#include "autobatch/rules/flush_record.h"

#include <c10/util/ArrayRef.h>

#include <vector>

namespace autobatch {

// Runs the passes before scheduling. `graph` was built from `nodes` and `held` (FlushGraph::build).
// The effects of each pass are added to `report`.
void rewrite_graph(Tape& tape, FlushGraph& graph, InternTables& tables, at::ArrayRef<NodeId> nodes,
                   const std::vector<ValueId>* held, Report& report);

// Runs the passes after scheduling, on the batches of `record` from `first_batch` on.
void rewrite_schedule(FlushRecord& record, FlushGraph& graph, size_t first_batch, Report& report);

}  // namespace autobatch

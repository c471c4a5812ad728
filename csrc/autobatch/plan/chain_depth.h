// How long the longest chain of ops is that read each other, over the flushes of a block: what no
// schedule runs in fewer launches, and so no read of a value is to blame for.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/report.h"
#include "autobatch/rules/flush_record.h"

namespace autobatch {

// Of the nodes that a flush is about to run.
void note_depth(FlushRecord& record, const FlushGraph& graph, Report& report);

// Before what a closed record has computed becomes real: what reads it later goes on with its
// chains.
void keep_depths(const FlushRecord& record, const Report& report);

}  // namespace autobatch

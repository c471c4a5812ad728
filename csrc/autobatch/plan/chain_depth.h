// Length of the longest dependency chain of ops over all flushes of a block (Report::depth). No
// schedule can run a chain in fewer launches than its length, so these launches are not caused by
// reads of values.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/report.h"
#include "autobatch/rules/flush_record.h"

namespace autobatch {

// Computes the depth of each node that a flush is about to run, and updates Report::depth. Nodes
// that read results of earlier flushes continue the chains of these results.
void note_depth(FlushRecord& record, const FlushGraph& graph, Report& report);

// Remembers the depths of the tensors computed by a closed record, so that later readers continue
// their chains. Must be called before the tensors become real.
void keep_depths(const FlushRecord& record, const Report& report);

}  // namespace autobatch

// Computes the length of the longest chain of dependent ops over all flushes of a block
// (Report::depth). No schedule can run a chain in fewer launches than its length, even if no value
// is read.
#pragma once

#include "autobatch/plan/flush_graph.h"
#include "autobatch/report.h"
#include "autobatch/rules/flush_record.h"

namespace autobatch {

// Computes the depth of each node that a flush is about to run, and updates Report::depth. The
// depth of a node that reads a result of an earlier flush includes the depth of this result.
void note_depth(FlushRecord& record, const FlushGraph& graph, Report& report);

// Remembers the depths of the tensors computed by a closed record, for nodes that read these
// tensors later. Must be called before the tensors become real.
void keep_depths(const FlushRecord& record, const Report& report);

}  // namespace autobatch

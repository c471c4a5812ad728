// Runs a flush, which turns the pending tensors of a captured graph into real tensors.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/report.h"
#include "autobatch/schedule.h"

#include <ATen/ThreadLocalState.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace autobatch {

struct InternTables;
class ReadRecords;
class DeferredChecks;
struct EagerEstimate;
class SliceCosts;
class Verifier;
class WeightCopies;

// The reason why a node was not computed, and the message for later uses of the node's tensors.
struct OpFailure {
  std::exception_ptr cause;
  std::shared_ptr<const std::string> reason;  // the message; shared by all lost tensors
};

// Suffix of FlushOptions::reason for a flush that instances of a map wait for.
inline constexpr const char* kOfMap = " (instances of a map wait for it)";

struct FlushOptions {
  const Policy* policy;
  Report* report;
  const at::ThreadLocalState* clean;  // the thread state in which the flush runs
  std::shared_ptr<InternTables> tables;
  Verifier* verifier;  // verifies computed results; may be null
  std::string reason;
  std::vector<OpFailure>* losses = nullptr;  // receives an entry for each failed op
  bool values_only = false;  // the targets' tensors may stay pending (incremental_flush.h)
  ReadRecords* read_records = nullptr;    // the scope's read records (overwrites.h); may be null
  DeferredChecks* checks = nullptr;       // the assertions that wait for values; may be null
  SliceCosts* costs = nullptr;            // set only for a slice: receives the times of batches
  WeightCopies* weight_copies = nullptr;  // the scope's copies (packed_weights.h); may be null
  EagerEstimate* estimate = nullptr;      // receives the estimated eager time; may be null
};

// Schedules and runs the nodes that the targets need, together with nodes that fit into the same
// batches (Graph::choose). Without targets, runs all nodes that held tensors depend on. Turns the
// pending tensors into real tensors. If a captured op fails, tensors that do not depend on this op
// become real, and the other tensors become lost. After a failure, an error is raised with the op,
// its shapes and the line of code that captured the op. If several ops failed, the error of the op
// that was captured first is raised. Even after an error, no selected node is pending.
void flush_pending(Graph& graph, at::ArrayRef<ValueId> targets, const FlushOptions& options);

// Runs about half of the pending nodes. Selects ready nodes that form the largest batches. The
// other nodes stay pending, so that they can be batched with nodes captured later. If nodes cannot
// stay pending, flushes all pending nodes as flush_pending does.
void relieve_graph(Graph& graph, const FlushOptions& options);

// Runs ready batches for about the time that `options.costs` allows. The other nodes stay pending.
// Tensors also stay pending, unless the open record has to be closed (incremental_flush.h). Returns
// false if no node is ready. If a captured op fails, only tensors that depend on this op become
// lost, and the error is raised.
bool run_slice(Graph& graph, const FlushOptions& options);

}  // namespace autobatch

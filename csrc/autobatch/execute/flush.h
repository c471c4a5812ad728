// A flush: from the captured graph to real tensors.
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
class ReadMemory;
class Checks;
struct EagerEstimate;
class SliceCosts;
class Verifier;

// Why something was not computed: what was raised, and what is told of it later.
struct OpFailure {
  std::exception_ptr cause;
  std::shared_ptr<const std::string> reason;  // the tensors lost to it share the object
};

// Ends the reason of a flush that instances of a map wait for.
inline constexpr const char* kOfMap = " (instances of a map wait for it)";

struct FlushOptions {
  const Policy* policy;
  Report* report;
  const at::ThreadLocalState* clean;  // the thread's state to run under
  std::shared_ptr<InternTables> tables;
  Verifier* verifier;  // may be null
  std::string reason;
  std::vector<OpFailure>* losses = nullptr;  // gets one for each op that failed
  bool values_only = false;           // the targets' tensors may stay pending (incremental_flush.h)
  ReadMemory* read_memory = nullptr;  // of the scope (overwrites.h)
  Checks* checks = nullptr;           // that wait for what is computed; may be null
  SliceCosts* costs = nullptr;        // of a slice: are told how long batches take
  EagerEstimate* estimate = nullptr;  // is to be made, if not null
};

// Schedules and runs all that somebody can still reach (or, if there are targets, what those need:
// Graph::split), and turns the pending tensors into real ones. On an error in a captured op: what
// does not depend on it becomes real, the rest is lost, and the error (of several, that of the op
// captured first) is raised with the op, its shapes and the line that captured it. None of it is in
// the graph afterwards either way.
void flush_graph(Graph& graph, at::ArrayRef<ValueId> targets, const FlushOptions& options);

// Runs half of what is pending: what is ready, in the largest batches that there are. The rest
// stays as it is, for more to come that runs with it. Where that can't be: all of it, as above.
void relieve_graph(Graph& graph, const FlushOptions& options);

// Runs batches that are ready for about the time that `options.costs` allows; the rest stays as it
// is. Nothing becomes real. False: nothing is ready. On an error in a captured op what depends on
// it is lost, and that alone; the error is raised.
bool run_slice(Graph& graph, const FlushOptions& options);

}  // namespace autobatch

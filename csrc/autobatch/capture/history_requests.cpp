#include "autobatch/capture/history_requests.h"

#include "autobatch/capture/capture.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/rules/factories.h"
#include "autobatch/scope/scope.h"

namespace autobatch {
namespace {

// The graph of this thread's last request, and the numbering of the graph at that time. A flush
// that answers requests usually changes the numbering.
struct LastRequest {
  const Graph* graph = nullptr;
  uint64_t numbering = 0;
};
thread_local LastRequest last_request;

}  // namespace

bool must_flush_before_write(const Graph& graph, ValueId base) {
  const bool recent = last_request.graph == &graph && last_request.numbering == graph.numbering();
  return recent || has_requests(graph.tape(), base);
}

bool defer_request(const at::TensorBase& tensor, PendingTensor::Request request) {
  PendingTensor* pending = as_pending(tensor);
  Scope* scope = pending != nullptr ? capturing_scope() : nullptr;
  if (scope == nullptr || CellTrace::current() != nullptr) return false;
  const Scope::Lock lock(*scope);
  Graph& graph = scope->graph();
  if (pending->graph() != &graph) return false;
  const ValueId id = pending->value();
  if (!is_result(*pending) && !is_leaf(graph.tape(), id)) return false;
  const Value& value = graph.value(id);
  if (value.base != id || value.is_graph_input() || graph.has_writes()) return false;
  // Eager calls the hooks of several results of one node together.
  if (graph.tape().nodes[value.node].num_values != 1) return false;
  pending->add_request(request);
  last_request = {&graph, graph.numbering()};
  return true;
}

}  // namespace autobatch

// Counts the readers of results, for passes that fuse several nodes into one.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/plan/flush_graph.h"

#include <vector>

namespace autobatch {

class Uses {
 public:
  // Counts reads by nodes of the graph. is_unseen() also considers waiting nodes, which do not run
  // now but may read the results later.
  Uses(Tape& tape, const FlushGraph& graph);

  // Whether a pass may take the value away, together with its only reader's operand: whether the
  // value is a result of a node of the graph and no view, exactly one operand of the
  // graph reads the results of that node, and neither a tensor of the user nor a view refers to the
  // value.
  bool is_unseen(ValueId id) {
    const Value& value = tape_.values[id];
    if (value.parent != kNone || value.tensor != nullptr || value.next_view != kNone) return false;
    if (value.is_graph_input()) return false;
    const uint32_t number = graph_.number(value.node);
    return number != kNone && uses_[number] == 1 && !tape_.is_read(id);
  }

 private:
  Tape& tape_;
  const FlushGraph& graph_;
  std::vector<uint32_t> uses_;  // by node number: reads of its results
};

// Returns the signature with this key, for fused nodes that run by `rule` in place of nodes like
// `plain`. Errors and reports name the op and site of `plain`.
Signature* joined_signature(SignatureTable& signatures, const Key& key, const Signature& plain,
                            const Rule& rule, uint64_t weight_slots, const char* note);

}  // namespace autobatch
